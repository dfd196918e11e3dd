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

Next leave_kernel(Warp& warp, const Operation&, uint32_t mask) {
    return warp.exit(mask);
}

Next trap(Warp&, const Operation& operation, uint32_t mask) {
    throw Fault("trap", "the kernel executed a " + operation.instruction->opcode, __builtin_ctz(mask));
}

Next past_the_end(Warp&, const Operation&, uint32_t mask) {
    throw Fault("trap", "a function ended without a return", __builtin_ctz(mask));
}

}  // namespace

void decode_branch(Decoder& d) {
    d.accept("uni");  // a hint; lanes that diverge nevertheless are handled
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

// In a .func, a return is a branch to its end, where all lanes reconverge.
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

void decode_trap(Decoder& d) {
    d.require_operands(0, 0);
    d.operation().type = Class::kControl;
    d.operation().execute = trap;
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
    end.execute = is_entry ? leave_kernel : past_the_end;  // a .func returns in arrive_at_joins, before this executes
    return end;
}

}  // namespace emulator
