// Kernels with host code for the emulated CUDA runtime. Functions for ctypes return the CUDA error; results go to
// `out`.
#include <cuda_runtime.h>

#include <cstdint>

__device__ int counter = 3;
__constant__ int table[4] = {1, 2, 3, 4};

struct Pair {
    char small;
    double large;
};

__global__ void store(int* out, int n, Pair pair) {
    if (threadIdx.x < n)
        out[threadIdx.x] = counter + table[threadIdx.x % 4] + pair.small + static_cast<int>(pair.large);
}

template <int kValue>
__global__ void fill(int* out) {
    out[blockIdx.x] = kValue;
}

// Stores the architecture that its PTX was compiled for, plus 1 for a specific one (sm_90a).
__global__ void which(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *out = __CUDA_ARCH__ + 1;
#elif defined(__CUDA_ARCH__)
    *out = __CUDA_ARCH__;
#endif
}

__global__ void __launch_bounds__(96) use_shared(int* out, int bytes) {
    extern __shared__ char dynamic[];
    __shared__ char fixed[1024];
    fixed[threadIdx.x] = 1;
    if (bytes > 0 && threadIdx.x == 0) dynamic[bytes - 1] = 1;
    __syncthreads();
    if (threadIdx.x == 0) *out = fixed[blockDim.x - 1] + (bytes > 0 ? dynamic[bytes - 1] : 0);
}

__global__ void cluster_sizes(int* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    out[blockIdx.x] = size;
#endif
}

__global__ void add_one(int* data) {
    data[threadIdx.x] += 1;
}

extern "C" {

cudaError_t run_store(int* out, int n) {
    store<<<1, 32>>>(out, n, Pair{10, 100.5});
    return cudaGetLastError();
}

cudaError_t run_fill(int* out) {
    fill<7><<<3, 1>>>(out);
    return cudaGetLastError();
}

cudaError_t run_which(int* out) {
    which<<<1, 1>>>(out);
    return cudaGetLastError();
}

cudaError_t set_variables(int value, const int* values) {
    const cudaError_t error = cudaMemcpyToSymbol(counter, &value, sizeof(value));
    return error != cudaSuccess ? error : cudaMemcpyToSymbol(table, values, sizeof(table));
}

cudaError_t get_counter(int* out) {
    return cudaMemcpyFromSymbol(out, counter, sizeof(*out));
}

cudaError_t run_use_shared(int* out, int threads, int bytes) {
    use_shared<<<1, threads, bytes>>>(out, bytes);
    return cudaGetLastError();
}

cudaError_t allow_shared(int bytes) {
    return cudaFuncSetAttribute(use_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

cudaError_t set_function_attribute(int attribute, int value) {
    return cudaFuncSetAttribute(use_shared, static_cast<cudaFuncAttribute>(attribute), value);
}

// Returns static shared bytes, most dynamic shared bytes, most threads, and PTX version.
cudaError_t function_attributes(int* out) {
    cudaFuncAttributes found;
    const cudaError_t error = cudaFuncGetAttributes(&found, use_shared);
    out[0] = static_cast<int>(found.sharedSizeBytes);
    out[1] = found.maxDynamicSharedSizeBytes;
    out[2] = found.maxThreadsPerBlock;
    out[3] = found.ptxVersion;
    return error;
}

cudaError_t occupancy(int* out, int threads, size_t bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, use_shared, threads, bytes);
}

cudaError_t run_clusters(int* out, int ctas, int cluster) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(32);
    config.attrs = attributes;
    config.numAttrs = 2;
    const cudaError_t error = cudaLaunchKernelEx(&config, cluster_sizes, out);
    return error != cudaSuccess ? error : cudaDeviceSynchronize();  // the next launch would not wait for this one
}

cudaError_t allow_large_clusters() {
    return cudaFuncSetAttribute(cluster_sizes, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaError_t run_with_attribute(int* out, int attribute) {
    cudaLaunchAttribute other = {};
    other.id = static_cast<cudaLaunchAttributeID>(attribute);
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.attrs = &other;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, fill<1>, out);
}

cudaError_t device_attribute(int* out, int attribute) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(out, static_cast<cudaDeviceAttr>(attribute), device);
}

// Returns compute capability, SMs and opt-in shared memory from the device's properties.
cudaError_t properties(int* out) {
    cudaDeviceProp found;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&found, device);
    out[0] = 10 * found.major + found.minor;
    out[1] = found.multiProcessorCount;
    out[2] = static_cast<int>(found.sharedMemPerBlockOptin);
    return error;
}

// Copies 0 to 31 to the device, adds 1 to each, and copies them back, with a stream and an event.
cudaError_t use_memory_and_streams(int* out) {
    int* data = nullptr;
    cudaStream_t stream;
    cudaEvent_t event;
    int numbers[32];
    for (int i = 0; i < 32; ++i) numbers[i] = i;
    cudaMalloc(&data, sizeof(numbers));
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    cudaMemsetAsync(data, 0, sizeof(numbers), stream);
    cudaMemcpyAsync(data, numbers, sizeof(numbers), cudaMemcpyHostToDevice, stream);
    add_one<<<1, 32, 0, stream>>>(data);
    cudaEventRecord(event, stream);
    cudaStreamWaitEvent(stream, event, 0);
    cudaMemcpyAsync(out, data, sizeof(numbers), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
    cudaFree(data);
    return cudaGetLastError();
}

// With more than 32 threads, writes beyond an allocation.
cudaError_t overrun(int threads) {
    int* data = nullptr;
    cudaMalloc(&data, 32 * sizeof(int));
    add_one<<<1, threads>>>(data);
    const cudaError_t error = cudaGetLastError();
    cudaFree(data);
    return error;
}

cudaError_t peek_at_last_error() {
    return cudaPeekAtLastError();
}

cudaError_t get_last_error() {
    return cudaGetLastError();
}

const char* error_string(cudaError_t error) {
    return cudaGetErrorString(error);
}

const char* error_name(cudaError_t error) {
    return cudaGetErrorName(error);
}

// Returns a function of the driver, or nullptr.
void* entry_point(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status);
    return error == cudaSuccess && status == cudaDriverEntryPointSuccess ? found : nullptr;
}
}
