// Errors of the emulated CUDA runtime. As in CUDA's, each thread has its last one; what a kernel did wrong is told in
// full by cudaGetErrorString of the code that its launch has returned, in the thread that launched it.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exports.h"
#include "fault.h"

namespace emulator::runtime {

// Makes `code` the thread's last error, with `reason` for cudaGetErrorString if there is one, and returns it.
cudaError_t fail(cudaError_t code, const std::string& reason = "");
// The same for what a kernel did wrong. The Fault is kept for Python, process-wide, until the next one.
cudaError_t fail(const Fault& fault);

// All that failed since the last call, as "name of the error: reason", also what host code took no notice of.
std::vector<std::string> take_failures();

// What was done all the same, though no document has it so. All such texts since the last call.
void warn(const std::string& text);
std::set<std::string> take_warnings();

// The last Fault, if `message` tells of it.
std::optional<Fault> fault_told_in(const std::string& message);

}  // namespace emulator::runtime
