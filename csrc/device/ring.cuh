// A ring of stages in shared memory between a producer, which fills the stages, usually by TMA, and the warps that
// consume them. Each stage has two mbarriers. `full` completes when the bytes of the stage's tile have landed. `empty`
// completes when every consumer has read the tile. In a cluster each CTA has the same ring, and copies some rows of
// each tile into all CTAs. So a stage is empty only when the consumers of all CTAs have read it.
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

    // Called by one thread before any thread uses the barriers. num_consumers: how many warps, of all CTAs of the
    // cluster, release a stage. num_producers: how many arrivals make a stage full.
    FASTATTN_DEVICE void init(int num_consumers, int num_producers = 1) {
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(shared_address(&full[stage]), num_producers);
            ptx::mbarrier_init(shared_address(&empty[stage]), num_consumers);
        }
    }
};

// One more mbarrier for each stage of a ring. In every round of the ring, it completes when num_threads threads have
// copied their rows with cp.async, or have searched the tile for NaN and infinity.
template <int kStages>
struct StageBarriers {
    uint64_t done[kStages];

    // Called by one thread before any thread uses the barriers.
    FASTATTN_DEVICE void init(int num_threads) {
        for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(shared_address(&done[stage]), num_threads);
    }
};

// The position of a producer or consumer in the ring: its stage, and its phase, which is the parity of its rounds.
template <int kStages>
struct Ring {
    uint32_t barriers;  // RingBarriers in shared memory
    int32_t stage = 0;
    uint32_t phase = 0;

    FASTATTN_DEVICE explicit Ring(const RingBarriers<kStages>& barriers) : barriers(shared_address(&barriers)) {}

    // The position after `times` calls of advance(), for a producer or consumer that keeps one count for several rings.
    FASTATTN_DEVICE Ring(const RingBarriers<kStages>& barriers, uint32_t times)
        : barriers(shared_address(&barriers)), stage(times % kStages), phase(times / kStages % 2) {}

    // Returns the same position in another ring, for a producer or consumer that goes through two rings in lockstep.
    FASTATTN_DEVICE Ring at_same_stage(const RingBarriers<kStages>& other) const {
        Ring ring(other);
        ring.stage = stage;
        ring.phase = phase;
        return ring;
    }

    // Returns the position before this one in another ring, for a producer or consumer that goes through two rings one
    // step apart.
    FASTATTN_DEVICE Ring before(const RingBarriers<kStages>& other) const {
        Ring ring(other);
        ring.stage = stage == 0 ? kStages - 1 : stage - 1;
        ring.phase = stage == 0 ? phase ^ 1 : phase;
        return ring;
    }

    // Producer: waits until every consumer has read what the stage held.
    FASTATTN_DEVICE void wait_empty() const { ptx::mbarrier_wait_parity(empty(), phase ^ 1); }

    // Producer: does what wait_empty() does, before TMA fills the stage. TMA may overwrite data that threads have read
    // only after a proxy fence. The producer executes this fence for the reads of all threads of its CTA, so that
    // consumers need none in their loops. A thread that reads what the producer of another CTA brings executes the
    // fence itself, before it releases the stage: a fence for the whole cluster (.shared::cluster) is also a fence for
    // the whole GPU in machine code (MEMBAR.ALL.GPU), which would delay every stage.
    FASTATTN_DEVICE void wait_empty_for_tma() const {
        wait_empty();
        ptx::fence_proxy_async_shared();
    }

    // Producer, one thread: calls wait_empty_for_tma(), and returns the barrier at which `bytes` bytes have to arrive
    // to make the stage full.
    FASTATTN_DEVICE uint32_t acquire(uint32_t bytes) const {
        wait_empty_for_tma();
        ptx::mbarrier_arrive_expect_tx(full(), bytes);
        return full();
    }

    // Producer: arrives at `full`, for stages that threads have filled.
    FASTATTN_DEVICE void arrive_full() const { ptx::mbarrier_arrive(full()); }

    // Producer, a whole warp: does what acquire() does, if the lanes divide the copies among themselves.
    FASTATTN_DEVICE uint32_t acquire_by_warp(uint32_t bytes, int lane) const {
        wait_empty_for_tma();
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full(), bytes);
        __syncwarp();  // waits until the barrier expects the bytes, before any lane copies
        return full();
    }

    // Producer, one thread: waits until the copies that other threads have started with cp.async have landed in the
    // stage, and tells the consumers. The fence makes the copied data visible to wgmma.
    FASTATTN_DEVICE void publish(const StageBarriers<kStages>& gathered) const {
        wait(gathered);
        ptx::fence_proxy_async_shared();
        arrive_full();
    }

    // Producer: returns the barrier at which the bytes of a stage arrive, for copies that are started without
    // acquire().
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

    // Consumer, one thread: releases a stage that has no other consumer.
    FASTATTN_DEVICE void release_by_thread() {
        ptx::mbarrier_arrive(empty());
        advance();
    }

    // Consumer, a whole warp: releases the stage in every CTA of the cluster.
    FASTATTN_DEVICE void release_to_cluster(int lane, int cluster_size) {
        if (lane < cluster_size) ptx::mbarrier_arrive_cluster(ptx::mapa(empty(), lane));
        advance();
    }

    // Consumer, one thread: says how many bytes make the stage full, if another CTA fills it. The bytes may land before
    // or after this call.
    FASTATTN_DEVICE void expect(uint32_t bytes) const { ptx::mbarrier_arrive_expect_tx(full(), bytes); }

    // Consumer, one thread: tells CTA `rank` of the cluster that the stage has been read.
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
