// CUDA runtime functions that query and select devices.
#include <cstdio>

#include "device.h"
#include "errors.h"
#include "exports.h"

using namespace emulator;
using namespace emulator::runtime;

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

cudaError_t cudaDriverGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = kCudaVersion;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    const std::optional<Device> asked = runtime::device(device);
    if (!asked) return fail(cudaErrorInvalidDevice);
    std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", properties_of(*asked).pciBusID + device);
    return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
    return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
    return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
    return fail(cudaErrorNotSupported, "the emulator draws no graphs");
}
