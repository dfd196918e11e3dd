// call: functions by name and through pointers, and the functions of the device library.
#include <algorithm>

#include "../machine.h"
#include "control.h"
#include "device_library.h"
#include "families.h"

namespace emulator {
namespace {

using Kind = ptx::Operand::Kind;

bool is_call(const ptx::Instruction& instruction) {
    return instruction.opcode == "call" || instruction.opcode.rfind("call.", 0) == 0;
}

// The operands of `call (results), callee, (arguments), list`; only the callee is required. With a list of targets or a
// prototype, the callee is a register.
struct Parts {
    const ptx::Operand *results = nullptr, *callee = nullptr, *arguments = nullptr, *list = nullptr;
    bool is_known = true;
};

Parts take_apart(const ptx::Instruction& instruction) {
    Parts parts;
    for (const ptx::Operand& operand : instruction.operands) {
        const ptx::Operand** part =
            operand.kind == Kind::kList   ? (parts.callee == nullptr ? &parts.results : &parts.arguments)
            : operand.kind == Kind::kName ? (parts.callee == nullptr ? &parts.callee : &parts.list)
                                          : nullptr;
        if (part == nullptr || *part != nullptr) {
            parts.is_known = false;
            return parts;
        }
        *part = &operand;
    }
    parts.is_known = parts.callee != nullptr;
    return parts;
}

size_t count(const ptx::Operand* list) {
    return list == nullptr ? 0 : list->elements.size();
}

// Returns how a call copies its arguments to one function and the results back. In the callee's frame, results come
// first, then parameters, as lay_out_formals places them.
std::unique_ptr<Call> make_call(Decoder& d, const Parts& parts, const FunctionCode& callee) {
    auto call = std::make_unique<Call>();
    call->callee = &callee;
    int64_t end = 0;
    for (const bool is_result : {true, false}) {
        const auto& formals = is_result ? callee.source->results : callee.source->parameters;
        const ptx::Operand* actual = is_result ? parts.results : parts.arguments;
        for (size_t i = 0; i < formals.size(); ++i) {
            end = (end + formals[i].alignment - 1) / formals[i].alignment * formals[i].alignment;
            const int64_t here = d.local_offset(actual->elements[i]);
            if (is_result) {
                call->results.push_back({end, here, formals[i].bytes});
            } else {
                call->arguments.push_back({here, end, formals[i].bytes});
            }
            end += formals[i].bytes;
        }
    }
    return call;
}

bool have_equal_sizes(const std::vector<ptx::Variable>& a, const std::vector<ptx::Variable>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const ptx::Variable& x, const ptx::Variable& y) { return x.bytes == y.bytes; });
}

Next call_by_name(Warp& warp, const Operation& o, uint32_t mask) {
    const Call* calls[kWarpSize];
    std::fill(calls, calls + kWarpSize, warp.cta.launch.program->calls[o.value].get());
    return warp.call(o, calls, mask);
}

// r[0]: the functions' addresses.
Next call_through_pointer(Warp& warp, const Operation& o, uint32_t mask) {
    const auto& functions = warp.cta.launch.program->indirect_calls[o.value];
    const uint64_t* addresses = warp.reg<uint64_t>(o.r[0]);
    const Call* calls[kWarpSize] = {};
    each_lane(mask, [&](int lane) {
        const auto found = functions.find(addresses[lane]);
        if (found == functions.end()) {
            throw Fault("call", "a call through a pointer that is the address of no function with these parameters",
                        lane);
        }
        calls[lane] = found->second;
    });
    return warp.call(o, calls, mask);
}

void decode_direct(Decoder& d, const Parts& parts) {
    const FunctionCode* callee = nullptr;
    for (const auto& function : d.program().functions) {
        if (function->source->name == parts.callee->name) callee = function.get();
    }
    if (callee == nullptr) d.fail("a call of an unknown form");
    if (count(parts.results) != callee->source->results.size() ||
        count(parts.arguments) != callee->source->parameters.size()) {
        d.fail("the call passes another number of parameters than the function has");
    }
    d.operation().value = static_cast<int64_t>(d.program().calls.size());
    d.program().calls.push_back(make_call(d, parts, *callee));
    d.operation().execute = call_by_name;
}

void decode_indirect(Decoder& d, const Parts& parts) {
    const auto* targets = d.call_targets(*parts.list);
    const ptx::Prototype* prototype = d.prototype(*parts.list);
    if (targets == nullptr && prototype == nullptr) d.fail("unknown list of targets or prototype " + parts.list->name);
    std::map<uint64_t, const Call*> found;
    for (const auto& function : d.program().functions) {
        const ptx::Function& source = *function->source;
        const auto address = d.function_address(source.name);
        if (!address) continue;  // the kernel
        const bool fits = targets != nullptr
                              ? std::find(targets->begin(), targets->end(), source.name) != targets->end()
                              : have_equal_sizes(source.parameters, prototype->parameters) &&
                                    have_equal_sizes(source.results, prototype->results);
        if (!fits) continue;
        if (count(parts.results) != source.results.size() || count(parts.arguments) != source.parameters.size()) {
            d.fail("the call passes another number of parameters than the functions have");
        }
        d.program().calls.push_back(make_call(d, parts, *function));
        found[*address] = d.program().calls.back().get();
    }
    d.operation().r[0] = d.read(*parts.callee, Type::kB64);
    d.operation().value = static_cast<int64_t>(d.program().indirect_calls.size());
    d.program().indirect_calls.push_back(std::move(found));
    d.operation().execute = call_through_pointer;
}

void add_function(const ptx::Module& module, const std::string& name, std::vector<const ptx::Function*>& found) {
    const auto function = module.functions.find(name);
    if (function == module.functions.end() || function->second->is_entry) return;
    if (std::find(found.begin(), found.end(), function->second.get()) == found.end()) {
        found.push_back(function->second.get());
    }
}

}  // namespace

void decode_call(Decoder& d) {
    d.accept("uni");
    const Parts parts = take_apart(*d.operation().instruction);
    if (!parts.is_known) d.fail("a call of an unknown form");
    d.operation().type = Class::kControl;
    if (parts.list != nullptr) return decode_indirect(d, parts);
    if (is_in_device_library(parts.callee->name)) {
        return decode_device_library(d, parts.callee->name, parts.results, parts.arguments);
    }
    decode_direct(d, parts);
}

void add_callees(const ptx::Module& module, const ptx::Function& caller, const ptx::Instruction& instruction,
                 std::vector<const ptx::Function*>& found) {
    if (is_call(instruction)) {
        const Parts parts = take_apart(instruction);
        if (!parts.is_known) return;
        if (parts.list == nullptr) {
            if (module.functions.find(parts.callee->name) == module.functions.end() &&
                !is_in_device_library(parts.callee->name)) {
                Fault fault("unsupported", "a call of " + parts.callee->name + ", which has no body in this module");
                fault.place.line = instruction.line;
                fault.place.text = module.line(instruction.line);
                throw fault;
            }
            return add_function(module, parts.callee->name, found);
        }
        for (const ptx::Scope& scope : caller.scopes) {
            const auto targets = scope.call_targets.find(parts.list->name);
            if (targets == scope.call_targets.end()) continue;
            for (const std::string& name : targets->second) add_function(module, name, found);
        }
        return;
    }
    for (const ptx::Operand& operand : instruction.operands) {
        if (operand.kind != Kind::kName) continue;
        add_function(module, operand.name, found);
        collect_functions(module, operand.name, found);
    }
}

}  // namespace emulator
