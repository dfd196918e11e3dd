#include "control.h"

#include "../machine.h"

namespace emulator {
namespace {

Next branch(Warp& warp, const Operation& operation, uint32_t mask) {
    return warp.branch(operation, mask);
}

Next branch_indexed(Warp& warp, const Operation& operation, uint32_t mask) {
    return warp.branch_indexed(operation, mask);
}

Next call(Warp& warp, const Operation& operation, uint32_t mask) {
    return warp.call(operation, mask);
}

Next leave_kernel(Warp& warp, const Operation&, uint32_t mask) {
    return warp.exit(mask);
}

Next nothing(Warp&, const Operation&, uint32_t) {
    return Next::kContinue;
}

Next trap(Warp&, const Operation& operation, uint32_t mask) {
    throw Fault("trap", "the kernel executed a " + operation.instruction->opcode, __builtin_ctz(mask));
}

Next past_the_end(Warp&, const Operation&, uint32_t mask) {
    throw Fault("trap", "a function ended without a return", __builtin_ctz(mask));
}

const ptx::Operand* callee_operand(const ptx::Instruction& instruction) {
    for (const ptx::Operand& operand : instruction.operands) {
        if (operand.kind == ptx::Operand::Kind::kName) return &operand;
    }
    return nullptr;
}

bool starts_with(const std::string& text, const char* prefix) {
    return text.rfind(prefix, 0) == 0;
}

}  // namespace

void decode_branch(Decoder& d) {
    d.accept("uni");  // a hint: lanes that part after all are parted
    d.require_operands(1, 1);
    d.operation().type = Class::kControl;
    d.operation().target = d.target(d.operand(0));
    d.operation().execute = branch;
}

void decode_branch_indexed(Decoder& d) {
    if (!d.accept("idx")) d.fail("only brx.idx is known");
    d.accept("uni");
    d.require_operands(2, 2);
    std::vector<int32_t> targets;
    for (const std::string& name : d.branch_targets(d.operand(1))) targets.push_back(d.label(name));
    d.operation().type = Class::kControl;
    d.operation().r[0] = d.read(0, Type::kU32);
    d.operation().value = static_cast<int64_t>(d.program().jump_tables.size());
    d.program().jump_tables.push_back(std::move(targets));
    d.operation().execute = branch_indexed;
}

// call (results), name, (arguments); either list may be missing.
void decode_call(Decoder& d) {
    d.accept("uni");
    auto call = std::make_unique<Call>();
    const ptx::Operand *results = nullptr, *callee = nullptr, *arguments = nullptr;
    for (size_t i = 0; i < d.num_operands(); ++i) {
        const ptx::Operand& operand = d.operand(i);
        if (operand.kind == ptx::Operand::Kind::kName && callee == nullptr) {
            callee = &operand;
        } else if (operand.kind == ptx::Operand::Kind::kList && (callee == nullptr ? results : arguments) == nullptr) {
            (callee == nullptr ? results : arguments) = &operand;
        } else {
            d.fail("a call of an unknown form");
        }
    }
    if (callee == nullptr) d.fail("a call of an unknown form");
    for (const auto& function : d.program().functions) {
        if (function->source->name == callee->name) call->callee = function.get();
    }
    const auto copies = [&](const ptx::Operand* list, const std::vector<ptx::Variable>& formals, bool into_callee) {
        const size_t count = list == nullptr ? 0 : list->elements.size();
        if (count != formals.size()) d.fail("the call passes another number of parameters than the function has");
        // The formals' places are those that lay_out_formals gives them.
        std::vector<Copy> found;
        int64_t end = 0;
        const ptx::Function& source = *call->callee->source;
        for (const auto* formal_list : {&source.results, &source.parameters}) {
            for (size_t i = 0; i < formal_list->size(); ++i) {
                const ptx::Variable& formal = (*formal_list)[i];
                end = (end + formal.alignment - 1) / formal.alignment * formal.alignment;
                if (formal_list == &formals) {
                    const int64_t here = d.local_offset(list->elements[i]);
                    found.push_back(into_callee ? Copy{here, end, formal.bytes} : Copy{end, here, formal.bytes});
                }
                end += formal.bytes;
            }
        }
        return found;
    };
    call->arguments = copies(arguments, call->callee->source->parameters, true);
    call->results = copies(results, call->callee->source->results, false);
    d.operation().type = Class::kControl;
    d.operation().value = static_cast<int64_t>(d.program().calls.size());
    d.program().calls.push_back(std::move(call));
    d.operation().execute = emulator::call;
}

// In a function, a return is a branch to its end, where all lanes meet.
void decode_return(Decoder& d) {
    d.accept("uni");
    d.operation().type = Class::kControl;
    d.operation().target = d.code().end;
    d.operation().execute = d.code().source->is_entry ? leave_kernel : branch;
}

void decode_exit(Decoder& d) {
    d.operation().type = Class::kControl;
    d.operation().execute = leave_kernel;
}

// An event for a profiler, which is not there.
void decode_pmevent(Decoder& d) {
    d.accept("mask");
    d.require_operands(1, 1);
    d.immediate(0);
    d.operation().type = Class::kControl;
    d.operation().execute = nothing;
}

// trap, and brkpt: there is no debugger.
void decode_trap(Decoder& d) {
    d.require_operands(0, 0);
    d.operation().type = Class::kControl;
    d.operation().execute = trap;
}

std::string callee_name(const ptx::Instruction& instruction) {
    if (instruction.opcode != "call" && !starts_with(instruction.opcode, "call.")) return "";
    const ptx::Operand* callee = callee_operand(instruction);
    return callee == nullptr ? "" : callee->name;
}

std::vector<int> successors_of(const Program& program, const FunctionCode& code, int index) {
    const Operation& operation = program.operations[index];
    std::vector<int> found;
    if (operation.execute == branch) found.push_back(operation.target);
    if (operation.execute == branch_indexed) found = program.jump_tables[operation.value];
    if (operation.execute == leave_kernel || operation.execute == trap) found.push_back(code.end);
    const bool falls_through = found.empty() || operation.is_guarded;
    if (falls_through) found.push_back(index + 1);
    return found;
}

Operation end_of_function(bool is_entry) {
    Operation end;
    end.type = Class::kControl;
    end.execute = is_entry ? leave_kernel : past_the_end;  // a function's paths are taken over before they execute it
    return end;
}

}  // namespace emulator
