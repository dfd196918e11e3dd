// A ring of stages in shared memory between a producer, which fills them, by TMA as a rule, and the warps that consume them. A
// stage has two mbarriers: `full` completes when the bytes of its tile have landed, `empty` when every consumer has read it. In a
// cluster each CTA has the same ring, and a part of each tile comes from every CTA: so the consumers of all CTAs empty a
// stage of all.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

template <int kStages>
struct RingBarriers {
    uint64_t full[kStages], empty[kStages];

    // One thread, before anybody uses them. num_consumers: warps that empty a stage, of all CTAs.
    __device__ __forceinline__ void init(int num_consumers) {
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(shared_address(&full[stage]), 1);
            ptx::mbarrier_init(shared_address(&empty[stage]), num_consumers);
        }
    }
};

// Where one side stands in the ring. The phase, the parity of the rounds, is kept here and nowhere else.
template <int kStages>
struct Ring {
    uint32_t barriers;  // RingBarriers in shared memory
    int32_t stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit Ring(const RingBarriers<kStages>& barriers)
        : barriers(shared_address(&barriers)) {}

    // Where a side stands that has gone on so many times: for those that keep one number for several rings.
    __device__ __forceinline__ Ring(const RingBarriers<kStages>& barriers, uint32_t times)
        : barriers(shared_address(&barriers)), stage(times % kStages), phase(times / kStages % 2) {}

    // Producer, one thread: waits until every consumer has read what the stage held.
    __device__ __forceinline__ void wait_empty() const { ptx::mbarrier_wait_parity(empty(), phase ^ 1); }

    // The same for a stage that gets so many bytes, which have to arrive at the barrier that is returned.
    __device__ __forceinline__ uint32_t acquire(uint32_t bytes) const {
        wait_empty();
        ptx::mbarrier_arrive_expect_tx(full(), bytes);
        return full();
    }

    // Producer, for a stage that it has written itself.
    __device__ __forceinline__ void pass_on() {
        ptx::mbarrier_arrive(full());
        advance();
    }

    // Consumer: waits until the tile has landed.
    __device__ __forceinline__ void wait_full() const { ptx::mbarrier_wait_parity(full(), phase); }

    // Consumer, a whole warp, when its reads are over. The ring of one CTA alone, and those of a cluster.
    __device__ __forceinline__ void release(int lane) {
        if (lane == 0) ptx::mbarrier_arrive(empty());
        advance();
    }

    __device__ __forceinline__ void release_to_cluster(int lane, int cluster_size) {
        if (lane < cluster_size) ptx::mbarrier_arrive_cluster(ptx::mapa(empty(), lane));
        advance();
    }

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }

  private:
    __device__ __forceinline__ uint32_t full() const { return barriers + stage * sizeof(uint64_t); }
    __device__ __forceinline__ uint32_t empty() const { return full() + kStages * sizeof(uint64_t); }
};

}  // namespace fastattn
