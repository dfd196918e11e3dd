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
void decode_pmevent(Decoder& d);

std::string callee_name(const ptx::Instruction& instruction);  // empty: no call
std::vector<int> successors_of(const Program& program, const FunctionCode& code, int index);
Operation end_of_function(bool is_entry);

}  // namespace emulator
