// CUDA runtime functions for memory. All of it is host memory: each block belongs to a device or is pinned, and lies
// between red zones.
#include <cstring>
#include <map>
#include <mutex>

#include "allocations.h"
#include "device.h"
#include "errors.h"
#include "exports.h"
#include "registry.h"
#include "streams.h"

using namespace emulator;
using namespace emulator::runtime;

namespace {

TrackedAllocations& all() {
    return TrackedAllocations::instance();
}

cudaError_t allocate(void** address, size_t bytes, int owner, const char* what) {
    bind_context();
    if (const cudaError_t error = check_allowed_now(what); error != cudaSuccess) return error;
    *address = all().allocate(bytes, owner);
    return *address != nullptr || bytes == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t release(void* address, bool is_host, const char* what) {
    if (address == nullptr) return cudaSuccess;
    if (const cudaError_t error = check_allowed_now(what); error != cudaSuccess) return error;
    const auto found = all().find(reinterpret_cast<uint64_t>(address));
    if (!found || !found->is_live || found->begin != reinterpret_cast<uint64_t>(address) ||
        (found->owner == TrackedAllocations::kPinned) != is_host) {
        return fail(cudaErrorInvalidValue, std::string("invalid argument: ") + what + " of memory that is not its own");
    }
    all().deallocate(address);
    return cudaSuccess;
}

// Returns true if `bytes` at `address` lie within one live block, or outside of all blocks: in pageable host memory.
bool is_valid(const void* address, size_t bytes) {
    const auto begin = reinterpret_cast<uint64_t>(address);
    const auto found = all().find(begin);
    return !found || bytes == 0 || (found->is_live && bytes <= found->end - begin);
}

cudaError_t fail_range(const char* what) {
    return fail(cudaErrorInvalidValue,
                std::string("invalid argument: ") + what + " leaves its allocation, or it is freed");
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
    if (!is_valid(to, bytes) || !is_valid(from, bytes)) return fail_range("a copy");
    std::memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t set(void* to, int value, size_t bytes) {
    if (!is_valid(to, bytes)) return fail_range("a memset");
    std::memset(to, value, bytes);
    return cudaSuccess;
}

// Returns the host's address of byte `offset` of a variable, or nullptr and sets `error`.
char* address_of(const void* symbol, size_t offset, size_t bytes, cudaError_t& error) try {
    const Variable* variable = Registry::instance().variable(symbol);
    if (variable == nullptr || offset + bytes > variable->bytes) {
        error = fail(variable == nullptr ? cudaErrorInvalidSymbol : cudaErrorInvalidValue);
        return nullptr;
    }
    const std::shared_ptr<LoadedModule> module = variable->binary->load();
    if (module == nullptr) {
        error = fail(cudaErrorNoKernelImageForDevice);
        return nullptr;
    }
    const uint64_t address = module->variable(variable->name);
    error = address == 0 ? fail(cudaErrorInvalidSymbol) : cudaSuccess;
    return address == 0 ? nullptr : reinterpret_cast<char*>(address) + offset;
} catch (const Fault& fault) {
    error = fail(fault);
    return nullptr;
}

std::mutex mutex;
std::map<void*, uint64_t> registered;  // cudaHostRegister's address to the number that `allow` returned

cudaError_t not_there(const char* what) {
    return fail(cudaErrorNotSupported, std::string("the emulator has no ") + what);
}

}  // namespace

cudaError_t cudaMalloc(void** address, size_t bytes) {
    make_current(device_index());
    return allocate(address, bytes, device_index(), "cudaMalloc");
}

cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) {
    return allocate(address, bytes, device_index(), "cudaMallocAsync");
}

cudaError_t cudaFree(void* address) {
    return release(address, /*is_host=*/false, "cudaFree");
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t) {
    return release(address, /*is_host=*/false, "cudaFreeAsync");
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    return allocate(address, bytes, TrackedAllocations::kPinned, "cudaHostAlloc");
}

cudaError_t cudaFreeHost(void* address) {
    return release(address, /*is_host=*/true, "cudaFreeHost");
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    const std::lock_guard lock(mutex);
    const auto begin = reinterpret_cast<uint64_t>(address);
    registered[address] = all().allow(begin, bytes, "memory that cudaHostRegister has pinned");
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
    const std::lock_guard lock(mutex);
    const auto found = registered.find(address);
    if (found == registered.end()) return fail(cudaErrorHostMemoryNotRegistered);
    all().disallow(found->second);
    registered.erase(found);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    std::memset(attributes, 0, sizeof(*attributes));
    const auto found = all().find(reinterpret_cast<uint64_t>(address));
    const bool is_known = found && found->is_live && found->owner != TrackedAllocations::kHost;
    const bool is_pinned = is_known && found->owner == TrackedAllocations::kPinned;
    attributes->type = !is_known ? cudaMemoryTypeUnregistered : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = !is_known ? cudaInvalidDeviceId : is_pinned ? device_index() : found->owner;
    if (is_known) attributes->devicePointer = const_cast<void*>(address);
    if (!is_known || is_pinned) attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = properties_of(device()).totalGlobalMem;
    *free = *total - all().live_bytes(device_index());
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (const cudaError_t error = check_allowed_now("cudaMemcpy"); error != cudaSuccess) return error;
    return copy(to, from, bytes);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return submit(stream, "a copy", [=] { return copy(to, from, bytes); });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    return submit(stream, "a copy of rows", [=] {
        cudaError_t error = cudaSuccess;
        for (size_t row = 0; row < height && error == cudaSuccess; ++row) {
            error =
                copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
        }
        return error;
    });
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    if (const cudaError_t error = check_allowed_now("cudaMemset"); error != cudaSuccess) return error;
    return set(to, value, bytes);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    return submit(stream, "a memset", [=] { return set(to, value, bytes); });
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

// --- Functions for several GPUs or processes ---

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    return fail(cudaErrorPeerAccessUnsupported);
}

// Graphs of the emulator own no memory.
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
    *static_cast<uint64_t*>(value) = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) {
    return not_there("memory pools");
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
    return not_there("memory pools");
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
    return not_there("memory pools");
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
    return not_there("memory pools");
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
    return not_there("memory pools");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
    return not_there("memory that processes share");
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
    return not_there("memory that processes share");
}
cudaError_t cudaIpcCloseMemHandle(void*) {
    return not_there("memory that processes share");
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
    return not_there("events that processes share");
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
    return not_there("events that processes share");
}
