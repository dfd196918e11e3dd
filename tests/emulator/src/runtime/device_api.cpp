// The functions of CUDA's runtime that concern the device, its memory, which is the host's, and its streams, on which
// everything is over when a function returns.
#include <cstring>

#include "allocations.h"
#include "device.h"
#include "errors.h"
#include "exports.h"
#include "registry.h"
#include "tensor_map.h"

using namespace emulator;
using namespace emulator::runtime;

namespace {

// Streams and events have nothing to remember; each has an address of its own.
struct Handle {
    char unused;
};

cudaError_t copy(void* to, const void* from, size_t bytes) {
    std::memmove(to, from, bytes);
    return cudaSuccess;
}

// The host's address of byte `offset` of a variable, nullptr with an error.
char* address_of(const void* symbol, size_t offset, size_t bytes, cudaError_t& error) try {
    const Variable* variable = Registry::instance().variable(symbol);
    if (variable == nullptr || offset + bytes > variable->bytes) {
        error = fail(variable == nullptr ? cudaErrorInvalidSymbol : cudaErrorInvalidValue);
        return nullptr;
    }
    const FatBinary::Loaded loaded = variable->binary->load();
    if (loaded.module == nullptr) {
        error = fail(cudaErrorNoKernelImageForDevice);
        return nullptr;
    }
    const uint64_t address = loaded.module->variable(variable->name);
    error = address == 0 ? fail(cudaErrorInvalidSymbol) : cudaSuccess;
    return address == 0 ? nullptr : reinterpret_cast<char*>(address) + offset;
} catch (const Fault& fault) {
    error = fail(fault);
    return nullptr;
}

// The driver's cuTensorMapEncodeTiled; the enumerations are ints as in C.
int encode_tensor_map(void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims,
                      const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                      int swizzle, int promotion, int fill) {
    return encode_tiled(map, data_type, rank, address, dims, strides, box, element_strides, interleave, swizzle,
                        promotion, fill);
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = device_index();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return make_current(device) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const std::optional<Device> asked = runtime::device(device);
    if (!asked) return fail(cudaErrorInvalidDevice);
    const std::optional<int> known = attribute_of(*asked, attribute);
    if (!known) {
        return fail(cudaErrorNotSupported, "the emulator does not know device attribute " + std::to_string(attribute));
    }
    *value = *known;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    const std::optional<Device> asked = runtime::device(device);
    if (!asked) return fail(cudaErrorInvalidDevice);
    *properties = properties_of(*asked);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}

// --- Memory ---

cudaError_t cudaMalloc(void** address, size_t bytes) {
    *address = TrackedAllocations::instance().allocate(bytes);
    return *address != nullptr || bytes == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) {
    return cudaMalloc(address, bytes);
}

cudaError_t cudaFree(void* address) {
    TrackedAllocations::instance().deallocate(address);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t) {
    return cudaFree(address);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return copy(to, from, bytes);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(to, value, bytes);
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    cudaError_t error;
    *address = address_of(symbol, 0, 0, error);
    return error;
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
    cudaError_t error;
    void* to = address_of(symbol, offset, bytes, error);
    return to == nullptr ? error : copy(to, from, bytes);
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset, cudaMemcpyKind) {
    cudaError_t error;
    const void* from = address_of(symbol, offset, bytes, error);
    return from == nullptr ? error : copy(to, from, bytes);
}

// --- Streams and events ---

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = reinterpret_cast<cudaStream_t>(new Handle);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<Handle*>(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(new Handle);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Handle*>(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaSuccess;
}

// --- The driver ---

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    *function = version <= kCudaVersion && std::strcmp(name, "cuTensorMapEncodeTiled") == 0
                    ? reinterpret_cast<void*>(&encode_tensor_map)
                    : nullptr;
    if (*function != nullptr) {
        if (status != nullptr) *status = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    if (status == nullptr) return fail(cudaErrorSymbolNotFound, std::string("the emulator has no ") + name);
    *status = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(name, function, kCudaVersion, flags, status);
}
