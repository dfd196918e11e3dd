// The parts of what Python sees that stand in files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace emulator {

void bind_allocations(pybind11::module_& m);
void bind_tensor_map(pybind11::module_& m);

}  // namespace emulator
