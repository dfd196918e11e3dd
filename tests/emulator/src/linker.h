// Addresses that a module's text names: those of its functions, and what initial values of variables point to.
#pragma once

#include <map>
#include <string>

#include "ptx.h"

namespace emulator {

// Addresses of a module's .global and .const variables, and of its functions.
using VariableAddresses = std::map<std::string, uint64_t, std::less<>>;

// Functions have addresses that are none of the memory: only a call through a pointer can use them.
constexpr uint64_t kFunctionWindow = uint64_t{0x4} << 56;

// Gives the functions addresses and completes the variables' initial values, at the addresses that `addresses` has for
// the variables.
void link(const ptx::Module& module, VariableAddresses& addresses);

// The functions whose addresses a variable holds, or holds through other variables.
void collect_functions(const ptx::Module& module, const std::string& variable,
                       std::vector<const ptx::Function*>& found);

}  // namespace emulator
