// Handles the device that the native ops run on. It is a GPU or, in a library built for the tests' emulator, the CPU:
// the emulator's CUDA runtime takes CPU tensors. In csrc, only this file and the dispatch key in bindings.cpp depend on
// which of them it is.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/driver.h"
#include "host/params.h"

namespace fastattn {

inline bool are_on_one_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
    return a.is_cuda() == b.is_cuda() && a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// Returns for example "cuda:1" or "cpu".
inline std::string device_text(const torch::stable::Tensor& tensor) {
    if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
    return tensor.is_cpu() ? "cpu" : "another device";
}

// Returns torch's current stream. The function that returns it is in libtorch_cuda, which a CPU-only torch lacks. It is
// looked up at the first call, so that this library also loads without libtorch_cuda. The default search finds it only
// in programs that link libtorch_cuda, because Python loads torch's libraries with RTLD_LOCAL.
inline Stream current_cuda_stream(int32_t device_index) {
    using Function = int32_t (*)(int32_t device_index, void** stream);
    static const Function function = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
        return reinterpret_cast<Function>(symbol);
    }();
    void* stream = nullptr;
    if (function == nullptr || function(device_index, &stream) != 0) {
        throw std::runtime_error(
            "fastattn: torch did not return its current CUDA stream; check that a CUDA build of torch is installed");
    }
    return static_cast<Stream>(stream);
}

// Makes the tensor's device CUDA's current device while this object lives. Does nothing for the emulator, which has one
// device and one stream.
class OnDeviceOf {
  public:
    explicit OnDeviceOf(const torch::stable::Tensor& tensor) {
        if (tensor.is_cuda()) {
            guard_.emplace(tensor.get_device_index());
            bind_device(tensor.get_device_index());  // torch's guard does nothing where the device is current
            stream_ = current_cuda_stream(tensor.get_device_index());
        }
    }
    Stream stream() const { return stream_; }  // torch's current one on this device

  private:
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
    Stream stream_ = nullptr;
};

}  // namespace fastattn
