// Launches registered kernels, and tells a listener of each launch.
#pragma once

#include <array>
#include <atomic>
#include <functional>

#include "registry.h"

namespace emulator::runtime {

// The options of all following launches, of all threads; Python sets them. Without `tracked`, accesses to global memory
// are checked only for addresses that no process maps, such as null pointers.
LaunchOptions options();
void set_options(const LaunchOptions& options);

// Makes each following launch run `runs` times with the same arguments and memory, as a replayed CUDA graph would. The
// listener is called after each run.
void set_runs_of_a_launch(int runs);

struct Launched {
    const Program& program;
    const Launch& launch;
    const Report& report;
};
// The listener is called after every launch, in the launching thread.
void set_listener(std::function<void(const Launched&)> listener);

struct Request {
    dim3 grid, block;
    std::array<uint32_t, 3> cluster = {0, 0, 0};  // {0, …}: the size that the kernel requires, else 1
    void** arguments;
    size_t shared_bytes;
    cudaStream_t stream = nullptr;
    bool is_cooperative = false;
    bool is_dependent = false;  // may begin before the previous kernel of its stream has ended
};

// Applies launch attributes, which have the same layout in the driver API. Performance hints have no effect.
cudaError_t apply(const cudaLaunchAttribute* attributes, unsigned num_attributes, Request& request);

// The kernel's code for the current device. code_of throws a Fault for invalid code; nullopt: no code for the device.
struct Code {
    std::shared_ptr<const LoadedModule> module;  // owns the program
    const Program& program;
};
std::optional<Code> code_of(const Kernel& kernel);

// Calls of cudaFuncSetAttribute in this process.
extern std::atomic<int64_t> attribute_calls;

// Returns the most dynamic shared memory of a CTA, as cudaFuncSetAttribute set it or by default.
int64_t most_dynamic_bytes(const Kernel& kernel, const Program& program);

// Compute how many CTAs fit on an SM, by threads and shared memory, and how many clusters fit on the device.
cudaError_t occupancy(const Kernel& kernel, const Code& code, int block_size, size_t shared_bytes, int& num_ctas);
cudaError_t cluster_occupancy(const Kernel& kernel, const Code& code, const Request& request, int& num_clusters);

// Allows CTAs of the kernel up to `bytes` of dynamic shared memory on the current device.
cudaError_t allow_dynamic_bytes(Kernel& kernel, const Code& code, int bytes);

// Runs the kernel to its end, or adds it to the graph if its stream is being captured. Returns the errors of
// cudaLaunchKernel, and the errors that the kernel itself causes.
cudaError_t launch(const Kernel& kernel, const Request& request);

}  // namespace emulator::runtime
