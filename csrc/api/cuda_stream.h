// The stream that torch wants work on.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include "host/params.h"

namespace fastattn {

// The symbol lives in libtorch_cuda, which a torch without CUDA does not have. So it is looked up at the first call,
// when there is a CUDA tensor, and this library still loads where there is none. Python loads torch's libraries for
// itself alone, so that the default search finds them only in a program that links them.
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

}  // namespace fastattn
