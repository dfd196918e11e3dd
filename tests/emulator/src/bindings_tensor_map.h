// Python bindings of tensor maps. Included by bindings.cpp only.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fault.h"
#include "tensor_map.h"

namespace emulator {
namespace {

// cuTensorMapEncodeTiled into the 128 bytes at address `map`. Returns a warning or "". Throws a Fault on an error.
std::string encode(uint64_t map, int type, uint64_t address, const std::vector<uint64_t>& dims,
                   const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box,
                   const std::vector<uint32_t>& element_strides, int interleave, int swizzle, int promotion, int fill) {
    const size_t rank = dims.size();
    if (strides.size() + 1 != rank || box.size() != rank || element_strides.size() != rank) {
        throw Fault("arguments", "a tensor map with lists of different lengths");
    }
    std::string reason;
    const int code = encode_tiled(reinterpret_cast<void*>(map), type, static_cast<uint32_t>(rank),
                                  reinterpret_cast<void*>(address), dims.data(), strides.data(), box.data(),
                                  element_strides.data(), interleave, swizzle, promotion, fill, &reason);
    if (code != 0) throw Fault(code == kNotSupported ? "unsupported" : "arguments", "a tensor map: " + reason);
    return reason;
}

}  // namespace

void bind_tensor_map(py::module_& m) {
    m.def("encode_tiled", &encode);
}

}  // namespace emulator
