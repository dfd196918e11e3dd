#include "linker.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "fault.h"

namespace emulator {
namespace {

constexpr uint64_t kFunctionSpacing = 16;

void collect(const ptx::Module& module, const std::string& name, std::set<std::string>& seen,
             std::vector<const ptx::Function*>& found) {
    const auto variable = module.variables.find(name);
    if (variable == module.variables.end() || !seen.insert(name).second) return;
    for (const ptx::InitialAddress& initial : variable->second.initial_addresses) {
        const auto function = module.functions.find(initial.name);
        if (function == module.functions.end()) {
            collect(module, initial.name, seen, found);
        } else if (std::find(found.begin(), found.end(), function->second.get()) == found.end()) {
            found.push_back(function->second.get());
        }
    }
}

}  // namespace

void link(const ptx::Module& module, VariableAddresses& addresses) {
    uint64_t next = kFunctionWindow;
    for (const auto& [name, function] : module.functions) {
        if (!function->is_entry) addresses.emplace(name, next += kFunctionSpacing);
    }
    for (const auto& [name, variable] : module.variables) {
        for (const ptx::InitialAddress& initial : variable.initial_addresses) {
            const auto found = addresses.find(initial.name);
            if (found == addresses.end()) {
                throw Fault("unsupported", "the initial value of " + name + " is the address of " + initial.name +
                                               ", which is no .global or .const variable or function with a body");
            }
            const uint64_t address = found->second + static_cast<uint64_t>(initial.addend);
            std::memcpy(reinterpret_cast<void*>(addresses.at(name) + initial.offset), &address, sizeof(address));
        }
    }
}

void collect_functions(const ptx::Module& module, const std::string& variable,
                       std::vector<const ptx::Function*>& found) {
    std::set<std::string> seen;
    collect(module, variable, seen, found);
}

}  // namespace emulator
