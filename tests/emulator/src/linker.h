// Resolves the addresses of a module's functions, and the initial values of variables that are addresses.
#pragma once

#include <map>
#include <string>

#include "ptx.h"

namespace emulator {

// The addresses of a module's .global and .const variables and of its functions, by name.
using VariableAddresses = std::map<std::string, uint64_t, std::less<>>;

// Functions get addresses in this window, which is no memory: only a call through a pointer can use them.
constexpr uint64_t kFunctionWindow = uint64_t{0x4} << 56;

// Adds the functions' addresses to `addresses`, which already has those of variables, and completes initial values.
void link(const ptx::Module& module, VariableAddresses& addresses);

// Appends to `found` the functions whose addresses a variable holds, directly or through other variables.
void collect_functions(const ptx::Module& module, const std::string& variable,
                       std::vector<const ptx::Function*>& found);

}  // namespace emulator
