// Launches of registered kernels: how they run, and who is told of them.
#pragma once

#include <array>
#include <atomic>
#include <functional>

#include "registry.h"

namespace emulator::runtime {

// What Python sets for the launches that follow, from whatever thread they come. Without `tracked` the bounds of global
// memory are not checked, since nobody knows them.
LaunchOptions options();
void set_options(const LaunchOptions& options);

// How often each launch that follows runs, with the same arguments and in the same memory: as a CUDA graph that holds it
// is replayed. The listener hears of each run.
void set_runs_of_a_launch(int runs);

struct Launched {
    const Program& program;
    const Launch& launch;
    const Report& report;
};
// Is called after every launch, in the thread that launched.
void set_listener(std::function<void(const Launched&)> listener);

struct Request {
    dim3 grid, block;
    std::array<uint32_t, 3> cluster = {0, 0, 0};  // {0, …}: what the kernel requires, else 1
    void** arguments;
    size_t shared_bytes;
    cudaStream_t stream = nullptr;
    bool is_cooperative = false;
    bool is_dependent = false;  // begins before the kernel that is before it in the stream has ended
};

// Follows the attributes of a launch; the driver's have the same layout. Those that only say how fast something should be
// have no effect.
cudaError_t apply(const cudaLaunchAttribute* attributes, unsigned num_attributes, Request& request);

// The kernel's code for the pretended device. Throws a Fault; nullopt: there is none for it.
struct Code {
    std::shared_ptr<const LoadedModule> module;  // whose program it is
    const Program& program;
};
std::optional<Code> code_of(const Kernel& kernel);

// How often cudaFuncSetAttribute was called, in this process.
extern std::atomic<int64_t> attribute_calls;

// What one CTA may have of dynamic shared memory, by default or by cudaFuncSetAttribute.
int64_t most_dynamic_bytes(const Kernel& kernel, const Program& program);

// CTAs of a kernel that an SM holds at a time, by threads and shared memory; and clusters that the device holds.
cudaError_t occupancy(const Kernel& kernel, const Code& code, int block_size, size_t shared_bytes, int& num_ctas);
cudaError_t cluster_occupancy(const Kernel& kernel, const Code& code, const Request& request, int& num_clusters);

// Lets a CTA of the kernel have so much dynamic shared memory on the current device.
cudaError_t allow_dynamic_bytes(Kernel& kernel, const Code& code, int bytes);

// Runs it to its end, unless its stream is being captured. Errors are those of cudaLaunchKernel, and whatever the kernel
// itself does wrong.
cudaError_t launch(const Kernel& kernel, const Request& request);

}  // namespace emulator::runtime
