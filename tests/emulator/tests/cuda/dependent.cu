// Kernels with griddepcontrol: one kernel, and others that may begin before it has ended.
#include <cuda_runtime.h>

__device__ int place() {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ void wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// out[i] = in[i] + 1
extern "C" __global__ void first(const int* in, int* out) {
    launch_dependents();
    out[place()] = in[place()] + 1;
}

enum When : int { kBefore, kAfter, kNever, kAfterOfThread0 };

__device__ void wait_at(int when, When here) {
    if (when == kAfterOfThread0 && here == kAfter) {
        if (threadIdx.x == 0) wait();
        __syncthreads();
    } else if (when == here) {
        wait();
    }
}

// `when` says whether the wait is before or after the access, or left out.
extern "C" __global__ void reads(const int* from, int* out, int when) {
    wait_at(when, kAfter);
    const int value = from[place()];
    wait_at(when, kBefore);
    out[place()] = value;
}

extern "C" __global__ void writes(int* to, int when) {
    wait_at(when, kAfter);
    to[place()] = -1;
    wait_at(when, kBefore);
}

// Adds to a counter that other kernels use too.
extern "C" __global__ void counts(int* counter) {
    atomicAdd(counter, 1);
}

// Lets the next kernel begin before or after its own wait, or does not wait.
extern "C" __global__ void between(int when) {
    wait_at(when, kAfter);
    launch_dependents();
    wait_at(when, kBefore);
}

namespace {

__global__ void of_host_reads(const int* from, int* out, int when) {
    wait_at(when, kAfter);
    out[place()] = from[place()];
}

__global__ void of_host_writes(int* out) {
    out[place()] = place();
}

}  // namespace

extern "C" {

const char* error_text(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

enum Between : int { kNothing, kCopy, kSynchronize };

// Runs two kernels in one stream, the second of which may begin early; in a graph if `captures`.
int run_pair(int* values, int* out, int when, int is_dependent, int between, int captures) {
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    if (captures != 0) cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    of_host_writes<<<2, 64, 0, stream>>>(values);
    if (between == kCopy) cudaMemcpyAsync(out, values, sizeof(int), cudaMemcpyDefault, stream);
    if (between == kSynchronize) cudaStreamSynchronize(stream);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = is_dependent;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(2);
    config.blockDim = dim3(64);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaLaunchKernelEx(&config, of_host_reads, static_cast<const int*>(values), out, when);
    if (captures != 0) {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        cudaStreamEndCapture(stream, &graph);
        cudaGraphInstantiateWithFlags(&executable, graph, 0);
        error = cudaGraphLaunch(executable, stream);
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
    }
    cudaStreamDestroy(stream);
    return error;
}
}
