// Launches kernels. Errors name the kernel, its grid and its shared memory.
//
// Every instance of a kernel includes this header. It includes none of the standard library's large headers (<string>,
// <stdexcept>, <atomic>), which would take most of the time in which the host code of an instance compiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/params.h"

namespace fastattn {

struct Launch {
    int64_t num_ctas;          // grid, in x
    int32_t threads;           // of a CTA
    size_t shared_bytes;       // dynamic shared memory of a CTA
    int32_t cluster_size = 1;  // CTAs that run together and see each other's shared memory; divides num_ctas
    // Programmatic dependent launch (PDL): lets CTAs begin once every CTA of the previous launch has called
    // ptx::griddepcontrol_launch_dependents() or ended, so while that launch may still run. Every thread must call
    // ptx::griddepcontrol_wait() before it reads what that launch writes, or writes what that launch reads or writes.
    // Ignored if the code that runs was not compiled for sm_90 or later.
    bool is_dependent = false;
};

// One kernel with its template arguments, for the life of the process. Keeps the name for error messages, and what it
// has found out and changed on each device.
class LaunchedKernel {
  public:
    LaunchedKernel(const char* name, int32_t compute_capability)
        : name_(name), compute_capability_(compute_capability) {}

    const char* name() const { return name_; }

    // Starts function(params) on the stream. Nothing is synchronised: errors of the run itself surface later. Any
    // thread may call it. Throws std::runtime_error where the launch fails.
    template <typename Params>
    void launch(void (*function)(Params), const Launch& launch, const Params& params, Stream stream) {
        start(reinterpret_cast<const void*>(function), launch, const_cast<Params*>(&params), stream);
    }

    // Throws std::runtime_error where a call has more work tiles than a grid can have CTAs. `tiles` names them.
    void check_work_tiles(int64_t count, const char* tiles) const;

  private:
    static constexpr int kRememberedDevices = 16;  // on later devices, each launch asks for both fields again

    // Accessed atomically, by several threads.
    struct OnDevice {
        size_t allowed_shared_bytes = 0;  // the kernel's limit of shared memory, or 0 if it was never raised
        int32_t ptx_version = 0;          // of the kernel's code for the device, times ten; 0: not known yet
    };

    void start(const void* function, const Launch& launch, void* params, Stream stream);
    void allow_shared_memory(const void* function, const Launch& launch, OnDevice& device) const;
    bool can_wait(const void* function, const Launch& launch, OnDevice& device) const;
    void check(const Launch& launch, cudaError_t error) const;
    [[noreturn]] void throw_error(const Launch& launch, const char* reason) const;

    const char* name_;
    int32_t compute_capability_;
    OnDevice devices_[kRememberedDevices];
};

}  // namespace fastattn
