// The device that the native ops run on: a GPU, or the host in a library built for the tests' emulator, whose CUDA
// runtime takes CPU tensors. In csrc only this file and the dispatch key of bindings.cpp know the difference.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/params.h"

namespace fastattn {

inline bool are_on_one_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
    return a.is_cuda() == b.is_cuda() && a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// "cuda:1", "cpu"
inline std::string device_text(const torch::stable::Tensor& tensor) {
    if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
    return tensor.is_cpu() ? "cpu" : "another device";
}

// Returns the stream on which torch wants work. The symbol lives in libtorch_cuda, which a CPU-only torch lacks.
// Looking it up at the first call lets this library load there too. Python loads torch's libraries with RTLD_LOCAL, so
// the default search finds the symbol only in a program that links them.
inline Stream current_cuda_stream(int32_t device_index) {
    using Function = int32_t (*)(int32_t device_index, void** stream);
    static const Function function = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
        return reinterpret_cast<Function>(symbol);
    }();
    void* stream = nullptr;
    if (function == nullptr || function(device_index, &stream) != 0) {
        throw std::runtime_error("fastattn: torch does not tell its current CUDA stream");
    }
    return static_cast<Stream>(stream);
}

// Makes the tensor's device CUDA's current one while this object lives. The emulator has one device and stream.
class OnDeviceOf {
  public:
    explicit OnDeviceOf(const torch::stable::Tensor& tensor) {
        if (tensor.is_cuda()) {
            guard_.emplace(tensor.get_device_index());
            stream_ = current_cuda_stream(tensor.get_device_index());
        }
    }
    Stream stream() const { return stream_; }  // on which torch wants work

  private:
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
    Stream stream_ = nullptr;
};

}  // namespace fastattn
