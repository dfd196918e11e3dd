// Python bindings of the tracked allocations, and two functions for torch_allocator.cpp. Only bindings.cpp includes it.
#pragma once

#include <pybind11/stl.h>

#include "allocations.h"

namespace emulator {
namespace {

TrackedAllocations& all() {
    return TrackedAllocations::instance();
}

void* allocate(size_t bytes) {
    return all().allocate(bytes);
}
void deallocate(void* begin) {
    all().deallocate(begin);
}

// Returns (address, bytes, name) of each allocation that launches may touch.
py::list live() {
    py::list found;
    for (const Allocation& allocation : all().snapshot()) {
        if (!allocation.is_live) continue;
        found.append(py::make_tuple(allocation.begin, allocation.end - allocation.begin, allocation.name));
    }
    return found;
}

}  // namespace

void bind_allocations(py::module_& m) {
    py::module_ part = m.def_submodule("allocations");
    part.def("functions", [] {
        return py::make_tuple(reinterpret_cast<uint64_t>(&allocate), reinterpret_cast<uint64_t>(&deallocate));
    });
    part.def("live", &live);
    part.def("allow",
             [](uint64_t begin, uint64_t bytes, const std::string& name) { return all().allow(begin, bytes, name); });
    part.def("disallow", [](uint64_t serial) { all().disallow(serial); });
    part.def("label", [](uint64_t address, const std::string& name) { return all().label(address, name); });
    part.def("verify", [] { return all().verify(); });
}

}  // namespace emulator
