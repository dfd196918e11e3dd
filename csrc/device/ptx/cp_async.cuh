// cp.async: asynchronous copies from global to shared memory, and the groups that order them.
// PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void cp_async_cg_16(uint32_t shared_address, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global) : "memory");
}

// Reads src_size bytes (0 to 16) and fills the rest of the 16 with zeros. With src_size = 0, global is not read.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared_address, const void* global, uint32_t src_size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global), "r"(src_size)
                 : "memory");
}

// Does the same for 4 bytes.
__device__ __forceinline__ void cp_async_ca_4(uint32_t shared_address, const void* global, uint32_t src_size) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(global), "r"(src_size)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's youngest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all copies that this thread has started have landed, whether or not they belong to a group.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace fastattn::ptx
