// cp.async.bulk.tensor: copies boxes of a tensor (TMA). PTX ISA, "Data Movement and Conversion Instructions:
// cp.async.bulk.tensor".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// Starts to copy the box at these coordinates, the contiguous dimension first. The mbarrier counts the bytes that have
// landed.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t destination, const void* tensor_map, int32_t x0,
                                                        int32_t x1, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(destination),
        "l"(tensor_map), "r"(x0), "r"(x1), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d(uint32_t destination, const void* tensor_map, int32_t x0,
                                                        int32_t x1, int32_t x2, int32_t x3, int32_t x4,
                                                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
        "%6}], [%7];" ::"r"(destination),
        "l"(tensor_map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier)
        : "memory");
}

// Copies into all CTAs of the cluster whose bits are set, at the same address in each. In each CTA, the CTA's own
// mbarrier, at the same address, counts the bytes.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_multicast(uint32_t destination, const void* tensor_map,
                                                                  int32_t x0, int32_t x1, uint32_t barrier,
                                                                  uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(tensor_map), "r"(x0), "r"(x1), "r"(barrier), "h"(ctas)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_multicast(uint32_t destination, const void* tensor_map,
                                                                  int32_t x0, int32_t x1, int32_t x2, int32_t x3,
                                                                  int32_t x4, uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
        "l"(tensor_map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier), "h"(ctas)
        : "memory");
}

// Starts to copy a box from shared memory. Elements outside of the tensor are not written. The operation joins this
// thread's next bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const void* tensor_map, int32_t x0, int32_t x1,
                                                              uint32_t source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(tensor_map),
                 "r"(x0), "r"(x1), "r"(source)
                 : "memory");
}

}  // namespace fastattn::ptx
