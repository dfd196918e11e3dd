// Runtime values into template arguments.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

namespace fastattn {

// Calls function(std::integral_constant<T, v>{}) for the v in the list that equals value; false if there is none.
template <typename T, T... kValues, typename Function>
bool dispatch_value(std::integer_sequence<T, kValues...>, T value, Function&& function) {
    return ((value == kValues && (function(std::integral_constant<T, kValues>{}), true)) || ...);
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
