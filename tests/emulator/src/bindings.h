// The parts of what Python sees that stand in files of their own.
#pragma once

#include <pybind11/pybind11.h>

#include "program.h"
#include "report.h"

namespace emulator {

void bind_allocations(pybind11::module_& m);
void bind_tensor_map(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);  // where there are CUDA's headers to compile it with

// What Python's Report is made of. shared_bytes: of a CTA, static and dynamic.
pybind11::dict report_of(const Program& program, const Report& report, int64_t shared_bytes);

}  // namespace emulator
