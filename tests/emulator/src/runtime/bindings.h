// Python bindings of the emulated CUDA runtime. Included by bindings.cpp only.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "device.h"
#include "errors.h"
#include "launching.h"
#include "streams.h"

namespace emulator {
namespace {

using namespace runtime;

py::tuple triple(const uint32_t (&size)[3]) {
    return py::make_tuple(size[0], size[1], size[2]);
}

// Makes every launch call callback(kernel, report_of's report, PTX, grid, block). None removes the callback.
void listen(const py::object& callback) {
    if (callback.is_none()) return set_listener(nullptr);
    // Never destroyed, because the thread that drops the listener may not hold the GIL.
    auto* const kept = new py::object(callback);
    set_listener([kept](const Launched& launched) {
        const py::gil_scoped_acquire acquire;
        const Launch& launch = launched.launch;
        const int64_t shared_bytes = launched.program.static_shared_bytes + launch.shared_bytes;
        (*kept)(launched.program.name, report_of(launched.program, launched.report, shared_bytes),
                launched.program.module->text, triple(launch.grid), triple(launch.block));
    });
}

// Submits a Python function to a stream: runs it now, or captures it as a node of a graph.
void submit_python(uint64_t stream, const std::string& what, const py::object& function) {
    const auto kept = std::shared_ptr<py::object>(new py::object(function), [](py::object* object) {
        const py::gil_scoped_acquire acquire;
        delete object;
    });
    const cudaError_t error = submit(reinterpret_cast<cudaStream_t>(stream), what, [kept]() -> cudaError_t {
        const py::gil_scoped_acquire acquire;
        try {
            (*kept)();
        } catch (const py::error_already_set& raised) {
            return fail(cudaErrorLaunchFailure, raised.what());
        }
        return cudaSuccess;
    });
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

void bind_runtime(py::module_& m) {
    py::module_ part = m.def_submodule("runtime");
    part.def("device", [] {
        const Device d = device();
        return py::make_tuple(10 * d.major + d.minor, d.num_sms, d.most_shared_bytes);
    });
    part.def("pretend", [](int arch, int num_sms, int64_t most_shared_bytes) {
        pretend({arch / 10, arch % 10, num_sms, most_shared_bytes});
    });
    part.def("set_devices", [](const std::vector<std::tuple<int, int, int64_t>>& all) {
        std::vector<Device> devices;
        for (const auto& [arch, num_sms, bytes] : all) devices.push_back({arch / 10, arch % 10, num_sms, bytes});
        set_devices(std::move(devices));
    });
    part.def("take_failures", &take_failures);
    part.def("take_warnings", &take_warnings);
    part.def("submit", &submit_python);
    part.def("attribute_calls", [] { return attribute_calls.load(); });
    part.def("set_options", [](const py::dict& given) { set_options(options_of(given)); });
    part.def("listen", &listen);
    part.def("set_runs_of_a_launch", &set_runs_of_a_launch);
    part.def("replace_in_ptx", &replace_in_ptx);
    part.def("raise_fault_told_in", [](const std::string& message) {
        if (const std::optional<Fault> fault = fault_told_in(message)) throw *fault;
    });
}

}  // namespace emulator
