// Branches, calls and returns.
#pragma once

#include <string>
#include <vector>

#include "../decoder.h"

namespace emulator {

void decode_branch(Decoder& d);
void decode_branch_indexed(Decoder& d);
void decode_call(Decoder& d);
void decode_return(Decoder& d);
void decode_exit(Decoder& d);
void decode_trap(Decoder& d);

// Appends to `found` the functions that an instruction may reach: those that it calls or takes the address of, and
// those whose addresses are in variables that it names. Throws a Fault if a callee has no body.
void add_callees(const ptx::Module& module, const ptx::Function& caller, const ptx::Instruction& instruction,
                 std::vector<const ptx::Function*>& found);
std::vector<int> successors_of(const Program& program, const FunctionCode& code, int index);
Operation end_of_function(bool is_entry);

}  // namespace emulator
