// Errors of the emulated CUDA runtime. As in CUDA, each thread has a last error. After a kernel's mistake, the
// launching thread gets the whole description from cudaGetErrorString of the launch's error code.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exports.h"
#include "fault.h"

namespace emulator::runtime {

// Makes `code` the thread's last error and returns it. A non-empty `reason` becomes the text of cudaGetErrorString.
cudaError_t fail(cudaError_t code, const std::string& reason = "");
// Does the same for a kernel's mistake. The process keeps the last Fault for Python.
cudaError_t fail(const Fault& fault);

// Returns all errors since the last call as "name of the error: reason", including those that host code ignored.
std::vector<std::string> take_failures();

// Warnings are about calls that succeeded with undocumented arguments. take_warnings returns those since its last call.
void warn(const std::string& text);
std::set<std::string> take_warnings();

// Returns the last Fault if `message` contains its text.
std::optional<Fault> fault_told_in(const std::string& message);

}  // namespace emulator::runtime
