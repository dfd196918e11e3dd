// Code that Hopper's int8 matmul kernels share: the cluster of two CTAs, and the ring that brings their operands into
// shared memory.
//
// A CTA has three warpgroups: two consumers, with 64 of the CTA's 128 columns of N each, and a producer. One thread of
// the producer copies by TMA; its other warps may read what has landed. Each CTA copies its own weights, and half of
// the input's rows into the shared memory of both CTAs. So a stage is empty only when the readers in both CTAs have
// read it.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/fragment.cuh"
#include "device/ptx/bulk_tensor.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ring.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/tensor_map.h"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/tiles_sm90.h"
#include "scheduler/stream_k.h"

namespace fastattn {

struct ClusterParams {
    Int8MatmulParams matmul;
    MatrixMap weight, input, result;
};

inline constexpr int kConsumerThreads = 2 * kWarpgroupSize;
inline constexpr int kBothConsumers = 1;      // the ID of a named barrier; __syncthreads() uses ID 0
inline constexpr int kResultBoxColumns = 64;  // of the boxes in which TMA stores the result

// A stage holds [kBlockM, 128 bytes] of the input in TMA's 128-byte swizzle, followed by the weights.
template <typename Tile>
struct alignas(1024) ClusterStorage {
    static constexpr int kInputBytes = Tile::kBlockM * 128;

    char stages[Tile::kNumStages][Tile::kStageBytes];
    char results[2][Tile::kResultBytes];  // rows on their way to the result (epilogue_sm90.cuh)
    RingBarriers<Tile::kNumStages> ring;

    FASTATTN_DEVICE uint32_t input(int stage) const { return shared_address(stages[stage]); }
    FASTATTN_DEVICE const char* weights(int stage) const { return stages[stage] + kInputBytes; }
};

FASTATTN_DEVICE int32_t own_cluster() {
    return static_cast<int32_t>(cluster_in_grid(kClusterSize));
}

// Initialises the ring. Called by all threads before any thread uses the ring. In each CTA, num_readers warps release a
// stage, and num_writers threads arrive when they have filled it.
template <typename Tile>
FASTATTN_DEVICE void start_cluster(ClusterStorage<Tile>& shared, int num_readers = Tile::kNumConsumers * 4,
                                   int num_writers = 1) {
    start_barriers(kClusterSize, [&] { shared.ring.init(kClusterSize * num_readers, num_writers); });
}

// Called by all threads before they exit. Waits until the other CTA's warps have arrived at this CTA's barriers for the
// last time.
FASTATTN_DEVICE void leave_cluster() {
    __syncwarp();  // waits until all lanes are here, because the cluster's barrier counts whole warps
    wait_for_cluster(kClusterSize);
}

// Calls function(work) for each work tile of this cluster.
template <typename Function>
FASTATTN_DEVICE void for_cluster_tiles(const MatmulSchedule& schedule, Function&& function) {
    MatmulWorkTile work;
    for (bool has_work = first_cluster_tile(schedule, own_cluster(), work); has_work;
         has_work = next_cluster_tile(schedule, own_cluster(), clusters_in_grid(kClusterSize), work)) {
        function(work);
    }
}

// A CTA's half of a cluster's tile.
struct CtaTile {
    int32_t m_tile;
    int32_t n_tile;  // counts tiles of kCtaN columns

    FASTATTN_DEVICE CtaTile(const MatmulSchedule& schedule, const MatmulWorkTile& work, int rank) {
        const TilePosition position = tile_position(schedule, work.tile);
        m_tile = position.m_tile;
        n_tile = position.n_tile * kClusterSize + rank;
    }
};

// Fills the stages of all work tiles. Called by one thread. Copies this CTA's half of the input's rows into both CTAs,
// input_columns elements of each row in a step. load_weights(tile, step, destination, barrier) starts the copies of a
// step's weights. kIsDependent: when this launch begins, the previous one may still write the input. It does not write
// the weights, so the first of them are on their way before the thread waits.
template <bool kIsDependent = false, typename Tile, typename LoadWeights>
FASTATTN_DEVICE void produce_for_cluster(ClusterStorage<Tile>& shared, const ClusterParams& params, int rank,
                                         int input_columns, LoadWeights&& load_weights) {
    constexpr int kRows = Tile::kBlockM / kClusterSize;
    const MatmulSchedule& schedule = params.matmul.epilogue.schedule;
    Ring<Tile::kNumStages> ring(shared.ring), input_ring = ring;
    bool may_read_input = !kIsDependent;
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) {
        const CtaTile tile(schedule, work, rank);
        const int32_t first_m = tile.m_tile * Tile::kBlockM + rank * kRows;
        const auto start_input = [&](int32_t step) {
            ptx::cp_async_bulk_tensor_2d_multicast(shared.input(input_ring.stage) + rank * kRows * 128,
                                                   &params.input.encoded, step * input_columns, first_m,
                                                   input_ring.full_barrier(), /*ctas=*/0b11);
            input_ring.advance();
        };
#pragma unroll 1  // unrolled, it would need more registers than the producer has
        for (int32_t step = work.begin_step; step < work.end_step; ++step) {
            const uint32_t landed = ring.acquire(Tile::kStageBytes);
            load_weights(tile, step, shared.input(ring.stage) + ClusterStorage<Tile>::kInputBytes, landed);
            ring.advance();
            if (may_read_input) {
                start_input(step);
            } else if (ring.stage == 0 || step == work.end_step - 1) {
                may_read_input = true;
                ptx::griddepcontrol_wait();
                for (int32_t first = work.begin_step; first <= step; ++first) start_input(first);
            }
        }
    });
}

// A consumer thread's position in its CTA.
struct ConsumerPosition {
    int warpgroup, warp, lane, rank;
    bool is_gated = false;

    FASTATTN_DEVICE int first_of_warp() const { return warpgroup * kWarpgroupM + warp * kMmaM; }

    // Returns one of this thread's two columns of N, counted in the CTA. half: 0 for the upper eight rows of an
    // accumulator's 16, 1 for the lower eight; see device/ptx/wgmma.cuh. With SwiGLU, the upper rows are gates, and the
    // lower rows the ups of the same columns of the result.
    FASTATTN_DEVICE int output(int half) const {
        return (is_gated ? first_of_warp() / 2 : first_of_warp()) + accumulator_row(lane) + half_distance() * half;
    }

    // Returns the distance of this thread's two columns of N.
    FASTATTN_DEVICE int half_distance() const { return is_gated ? kCtaN / 2 : kMmaM / 2; }
};

// The position of a thread whose two columns of N are adjacent.
struct AdjacentPosition : ConsumerPosition {
    FASTATTN_DEVICE int output(int half) const { return first_of_warp() + 2 * accumulator_row(lane) + half; }
    FASTATTN_DEVICE int half_distance() const { return 1; }
};

// Returns one of a thread's two columns of N, counted in the whole matrix. With SwiGLU the first 64 columns of a CTA
// are gates, and the other 64 the ups of the same columns of the result.
template <typename Position>
FASTATTN_DEVICE int32_t sum_column(const MatmulEpilogue& epilogue, const CtaTile& tile, const Position& position,
                                   int half) {
    constexpr int kHalf = kCtaN / 2;
    const int output = position.output(half);
    if (!position.is_gated) return tile.n_tile * kCtaN + output;
    return tile.n_tile * kHalf + output + (output >= kHalf ? epilogue.out.columns - kHalf : 0);
}

// The operands A of a step, which a consumer decodes into registers. rW[k] is the operand for the k-th 16 of the sum.
template <typename Tile>
using StepWeights = uint32_t[Tile::kBlockK / kMmaK][4];

// One consumer's side of the ring, for a consumer that decodes operands A. ahead: the stage to decode next. ring: the
// stage to release next.
template <DataType kDataType, typename Tile>
struct DecodingConsumer {
    ClusterStorage<Tile>& shared;
    int lane;
    Ring<Tile::kNumStages> ring, ahead;

    FASTATTN_DEVICE DecodingConsumer(ClusterStorage<Tile>& shared, int lane)
        : shared(shared), lane(lane), ring(shared.ring), ahead(shared.ring) {}

    FASTATTN_DEVICE void release() { ring.release_to_cluster(lane, kClusterSize); }

    // Adds the products of a work tile to rY. At most two steps have products in flight. decode(rW) waits until the
    // stage `ahead` is full, and decodes its weights to rW.
    template <typename Decode>
    FASTATTN_DEVICE void sum(float (&rY)[Tile::kBlockM / 2], int32_t num_steps, Decode&& decode) {
        StepWeights<Tile> rW[2];
        const auto start = [&](const StepWeights<Tile>& rW) {
            const auto sX = OperandDescriptor::k_major(shared.input(ahead.stage));
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < Tile::kBlockK / kMmaK; ++k) {
                ptx::Wgmma<Tile::kBlockM, kDataType>::rs_rows(rY, rW[k], sX.at(k * kMmaK * 2), true);
            }
            ptx::wgmma_commit_group();
            ahead.advance();
        };
        // Starts a step's products, and decodes the next weights into the registers of the step before.
        const auto step = [&](const StepWeights<Tile>& rW, StepWeights<Tile>& rBefore) {
            start(rW);
            ptx::wgmma_wait_group<1>();  // leaves the products of this step in flight
            release();
            decode(rBefore);
        };

        if (num_steps == 0) return;
        decode(rW[0]);
        start(rW[0]);
        int32_t left = num_steps - 1;  // steps whose products are not started
        if (left > 0) decode(rW[1]);
        for (; left > 2; left -= 2) {
            step(rW[1], rW[0]);
            step(rW[0], rW[1]);
        }
        if (left == 2) {
            step(rW[1], rW[0]);
            start(rW[0]);
        } else if (left == 1) {
            start(rW[1]);
        }
        wait_gemm<0>(rY);  // leaves none in flight
        if (num_steps > 1) release();
        release();
    }
};

// Returns the tile of a kernel for the table of kernels. is_gradient: the columns of the result are K of the weights,
// and steps run through N.
template <typename Tile>
constexpr Int8TileFacts cluster_tile_facts(bool is_gradient = false) {
    const MatmulTile tile = Tile::kMatmulTile;
    const int32_t block_n = is_gradient ? tile.block_k : kCtaN, block_k = is_gradient ? kCtaN : tile.block_k;
    return {{tile.block_m, block_n, block_k, Tile::kNumWarps, tile.ctas_per_sm}, tile};
}

// Launches as many clusters as can run at a time, but no more than have work. is_dependent: see host/launch.h.
template <typename Tile, typename Storage = ClusterStorage<Tile>>
void launch_clusters(LaunchedKernel& kernel, void (*function)(ClusterParams), const ClusterParams& params,
                     int32_t num_sms, Stream stream, bool is_dependent = false) {
    const Launch launch{int64_t{kClusterSize} * num_clusters(params.matmul.epilogue.schedule, num_sms / kClusterSize),
                        Tile::kNumThreads, sizeof(Storage), kClusterSize, is_dependent};
    kernel.launch(function, launch, params, stream);
}

}  // namespace fastattn
