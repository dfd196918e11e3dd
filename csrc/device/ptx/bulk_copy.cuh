// cp.async.bulk: copies contiguous bytes by TMA without a tensor map. cp.reduce adds them to numbers in global memory.
// PTX ISA, "Data Movement and Conversion Instructions: Bulk copy". Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// Starts to copy `bytes` bytes into shared memory. The mbarrier counts the bytes that have landed.
__device__ __forceinline__ void cp_async_bulk_shared_global(uint32_t destination, const void* global, uint32_t bytes,
                                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Starts to add `bytes` bytes of floats in shared memory to floats in global memory. The operation joins this thread's
// next bulk group.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* global, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all bulk groups of this thread have read their sources, which may then be overwritten.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all bulk groups of this thread are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace fastattn::ptx
