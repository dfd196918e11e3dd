// A ring of stages in shared memory between a producer, which fills them, usually by TMA, and the warps that consume
// them. A stage has two mbarriers: `full` completes when the bytes of its tile have landed, `empty` when every consumer
// has read it. In a cluster each CTA has the same ring, and copies some rows of each tile into all CTAs. So a stage is
// empty when the consumers of all CTAs have read it.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

template <int kStages>
struct RingBarriers {
    uint64_t full[kStages], empty[kStages];

    // Called by one thread before any other uses the barriers. num_consumers: how many warps of all CTAs empty a stage.
    // num_producers: how many arrivals make a stage full.
    FASTATTN_DEVICE void init(int num_consumers, int num_producers = 1) {
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(shared_address(&full[stage]), num_producers);
            ptx::mbarrier_init(shared_address(&empty[stage]), num_consumers);
        }
    }
};

// One more mbarrier for each stage of a ring. It completes in every round of the ring, when so many threads have copied
// their rows with cp.async, or searched the tile.
template <int kStages>
struct StageBarriers {
    uint64_t done[kStages];

    // Called by one thread before any other uses the barriers.
    FASTATTN_DEVICE void init(int num_threads) {
        for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(shared_address(&done[stage]), num_threads);
    }
};

// The position of one side in the ring: its stage, and its phase, the parity of the rounds.
template <int kStages>
struct Ring {
    uint32_t barriers;  // RingBarriers in shared memory
    int32_t stage = 0;
    uint32_t phase = 0;

    FASTATTN_DEVICE explicit Ring(const RingBarriers<kStages>& barriers) : barriers(shared_address(&barriers)) {}

    // The position of a side that has advanced so many times, for sides that keep one number for several rings.
    FASTATTN_DEVICE Ring(const RingBarriers<kStages>& barriers, uint32_t times)
        : barriers(shared_address(&barriers)), stage(times % kStages), phase(times / kStages % 2) {}

    // Returns the same stage of another ring, for a side that goes through two in step: one stage and phase serve both.
    FASTATTN_DEVICE Ring at_same_stage(const RingBarriers<kStages>& other) const {
        Ring ring(other);
        ring.stage = stage;
        ring.phase = phase;
        return ring;
    }

    // Returns the stage before this one in another ring, for a side that goes through two rings one step apart.
    FASTATTN_DEVICE Ring before(const RingBarriers<kStages>& other) const {
        Ring ring(other);
        ring.stage = stage == 0 ? kStages - 1 : stage - 1;
        ring.phase = stage == 0 ? phase ^ 1 : phase;
        return ring;
    }

    // Producer: waits until every consumer has read what the stage held.
    FASTATTN_DEVICE void wait_empty() const { ptx::mbarrier_wait_parity(empty(), phase ^ 1); }

    // Does the same before TMA fills the stage. TMA may overwrite what threads have read only after a proxy fence. The
    // producer's fence serves the reads of all consumers, which then need none in their loops.
    FASTATTN_DEVICE void wait_empty_for_tma() const {
        wait_empty();
        ptx::fence_proxy_async_shared_cluster();
    }

    // Does the same for one thread, and returns the barrier at which all `bytes` bytes of the stage have to arrive.
    FASTATTN_DEVICE uint32_t acquire(uint32_t bytes) const {
        wait_empty_for_tma();
        ptx::mbarrier_arrive_expect_tx(full(), bytes);
        return full();
    }

    // Producer: says that it has filled the stage itself.
    FASTATTN_DEVICE void arrive_full() const { ptx::mbarrier_arrive(full()); }

    // Does what acquire() does, for a warp whose lanes divide the copies.
    FASTATTN_DEVICE uint32_t acquire_by_warp(uint32_t bytes, int lane) const {
        wait_empty_for_tma();
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full(), bytes);
        __syncwarp();  // waits until the barrier expects the bytes, before any lane copies
        return full();
    }

    // Producer, one thread, where other threads copy with cp.async: waits until their copies have landed in the stage,
    // and tells the consumers. The fence makes what threads have written visible to wgmma.
    FASTATTN_DEVICE void publish(const StageBarriers<kStages>& gathered) const {
        wait(gathered);
        ptx::fence_proxy_async_shared();
        arrive_full();
    }

    // Producer: returns the barrier for the bytes of a stage, for copies started without acquire().
    FASTATTN_DEVICE uint32_t full_barrier() const { return full(); }

    // Waits until all threads have arrived at this stage of `barriers`.
    FASTATTN_DEVICE void wait(const StageBarriers<kStages>& barriers) const {
        ptx::mbarrier_wait_parity(shared_address(&barriers.done[stage]), phase);
    }

    FASTATTN_DEVICE void arrive(const StageBarriers<kStages>& barriers) const {
        ptx::mbarrier_arrive(shared_address(&barriers.done[stage]));
    }

    // Consumer: waits until the tile has landed.
    FASTATTN_DEVICE void wait_full() const { ptx::mbarrier_wait_parity(full(), phase); }

    // Consumer, a whole warp: releases the stage after its reads.
    FASTATTN_DEVICE void release(int lane) {
        if (lane == 0) ptx::mbarrier_arrive(empty());
        advance();
    }

    // Consumer, one thread: releases the stage that it alone empties.
    FASTATTN_DEVICE void release_by_thread() {
        ptx::mbarrier_arrive(empty());
        advance();
    }

    // Releases the stage in every CTA of the cluster.
    FASTATTN_DEVICE void release_to_cluster(int lane, int cluster_size) {
        if (lane < cluster_size) ptx::mbarrier_arrive_cluster(ptx::mapa(empty(), lane));
        advance();
    }

    // Consumer, one thread, where another CTA fills the stage: says how many bytes make it full, before or after they
    // land.
    FASTATTN_DEVICE void expect(uint32_t bytes) const { ptx::mbarrier_arrive_expect_tx(full(), bytes); }

    // Consumer, one thread: tells a CTA of the cluster that the stage has been read.
    FASTATTN_DEVICE void arrive_empty_at(uint32_t rank) const {
        ptx::mbarrier_arrive_cluster(ptx::mapa(empty(), rank));
    }

    FASTATTN_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }

  private:
    FASTATTN_DEVICE uint32_t full() const { return barriers + stage * sizeof(uint64_t); }
    FASTATTN_DEVICE uint32_t empty() const { return full() + kStages * sizeof(uint64_t); }
};

}  // namespace fastattn
