// Runtime values into template arguments.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

namespace fastattn {

// Calls function(std::integral_constant<T, v>{}) for the v in the list that equals value; false if there is none.
template <typename T, T... kValues, typename Function>
bool dispatch_value(std::integer_sequence<T, kValues...>, T value, Function&& function) {
    return ((value == kValues && (function(std::integral_constant<T, kValues>{}), true)) || ...);
}

// Likewise for the first v, in the order of the list, that is not less than value.
template <typename T, T... kValues, typename Function>
bool dispatch_at_least(std::integer_sequence<T, kValues...>, T value, Function&& function) {
    return ((value <= kValues && (function(std::integral_constant<T, kValues>{}), true)) || ...);
}

template <typename T, T... kValues>
constexpr bool contains(std::integer_sequence<T, kValues...>, T value) {
    return ((value == kValues) || ...);
}

template <typename T, T... kValues>
constexpr T largest(std::integer_sequence<T, kValues...>) {
    return std::max({kValues...});
}

template <typename Function>
void dispatch_bool(bool value, Function&& function) {
    dispatch_value(std::integer_sequence<bool, false, true>{}, value, std::forward<Function>(function));
}

// The list as messages show it: "64, 128".
template <int kFirst, int... kRest>
std::string list_text(std::integer_sequence<int, kFirst, kRest...>) {
    return (std::to_string(kFirst) + ... + (", " + std::to_string(kRest)));
}

}  // namespace fastattn
