// Code that Hopper's int8 matmul kernels share: the cluster of two CTAs, the ring that brings their operands into
// shared memory, and the epilogue that turns sums in registers into the result.
//
// A CTA has three warpgroups: two consumers, with 64 of the CTA's 128 columns of N each, and a producer. One thread of
// the producer copies by TMA; its other warps may read what has landed. Each CTA copies its own weights, and half of
// the input's rows into the shared memory of both CTAs. So a stage is empty only when the readers in both CTAs have
// read it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/cluster.cuh"
#include "device/fragment.cuh"
#include "device/ptx/bulk_tensor.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/st_shared.cuh"
#include "device/ring.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/tensor_map.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/tiles_sm90.h"
#include "scheduler/arrivals.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

struct ClusterParams {
    Int8MatmulParams matmul;
    MatrixMap weight, input;
};

inline constexpr int kConsumerThreads = 2 * kWarpgroupSize;
inline constexpr int kBothConsumers = 1;  // the ID of a named barrier; __syncthreads() uses ID 0

// A stage holds [kBlockM, 128 bytes] of the input in TMA's 128-byte swizzle, followed by the weights.
template <typename Tile>
struct alignas(1024) ClusterStorage {
    static constexpr int kInputBytes = Tile::kBlockM * 128;

    char stages[Tile::kNumStages][Tile::kStageBytes];
    float sums[Tile::kPassM * SumsLayout<kCtaN>::kRowElements];
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
    static constexpr int kHalfDistance = 8;  // the distance of a thread's two columns of N
    int warpgroup, warp, lane, rank;

    FASTATTN_DEVICE int first_of_warp() const { return warpgroup * kWarpgroupM + warp * kMmaM; }

    // Returns one of this thread's two columns of N, counted in the CTA. half: 0 for the upper eight rows of an
    // accumulator's 16, 1 for the lower eight; see device/ptx/wgmma.cuh.
    FASTATTN_DEVICE int output(int half) const {
        return first_of_warp() + accumulator_row(lane) + kHalfDistance * half;
    }
};

// The operands A of a step, which a consumer decodes into registers. rW[k] is the operand for the k-th 16 of the sum.
template <typename Tile>
using StepWeights = uint32_t[Tile::kBlockK / kMmaK][4];

// Starts rY += W · Xᵀ, or rY = W · Xᵀ without kAdds, over kSumK of a step's K from first_k on. The products run
// asynchronously.
template <DataType kDataType, int kSumK, bool kAdds, typename Tile>
FASTATTN_DEVICE void start_products(float (&rY)[Tile::kBlockM / 2], const StepWeights<Tile>& rW, OperandDescriptor sX,
                                    int first_k = 0) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = first_k / kMmaK; k < (first_k + kSumK) / kMmaK; ++k) {
        ptx::Wgmma<Tile::kBlockM, kDataType>::rs_rows(rY, rW[k], sX.at(k * kMmaK * 2), kAdds || k > first_k / kMmaK);
    }
    ptx::wgmma_commit_group();
}

// One consumer's side of the ring, for a consumer that decodes operands A. ahead: the stage to decode next. ring: the
// stage to release next.
template <DataType kDataType, typename Tile>
struct DecodingConsumer {
    ClusterStorage<Tile>& shared;
    int lane;
    Ring<Tile::kNumStages> ring, ahead;

    FASTATTN_DEVICE DecodingConsumer(ClusterStorage<Tile>& shared, int lane)
        : shared(shared), lane(lane), ring(shared.ring), ahead(shared.ring) {}

    FASTATTN_DEVICE OperandDescriptor input(int stage) const { return OperandDescriptor::k_major(shared.input(stage)); }

    FASTATTN_DEVICE void release() { ring.release_to_cluster(lane, kClusterSize); }

    // Adds the products of a work tile to rY. At most two steps have products in flight. decode(rW) waits until the
    // stage `ahead` is full, and decodes its weights to rW.
    template <typename Decode>
    FASTATTN_DEVICE void sum(float (&rY)[Tile::kBlockM / 2], int32_t num_steps, Decode&& decode) {
        StepWeights<Tile> rW[2];
        const auto start = [&](const StepWeights<Tile>& rW) {
            start_products<kDataType, Tile::kBlockK, true, Tile>(rY, rW, input(ahead.stage));
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

// Four sums of a thread.
template <typename Sum>
using FourSums = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;

// A CTA's view of the partials of a tile's sum. Sum: float or int32_t.
template <typename Sum>
struct ClusterPartials {
    SumPartials partials;
    int own;
    float* first;  // this thread's numbers in the first slot

    FASTATTN_DEVICE ClusterPartials(const MatmulEpilogue& epilogue, const MatmulWorkTile& work, int rank, int block_m)
        : partials{0, 1, 0}, own(0), first(nullptr) {
        if (is_whole(epilogue.schedule, work)) return;
        partials = sum_partials(epilogue.schedule, work.tile);
        own = own_cluster() - partials.first_cta;
        first = epilogue.partial + rank * block_m * kCtaN + threadIdx.x * 4;
    }

    // Returns this thread's numbers in the slot of a partial. Adjacent threads have adjacent numbers, 16 bytes each.
    template <int kBlockM>
    FASTATTN_DEVICE FourSums<Sum>* slot(int partial) const {
        return reinterpret_cast<FourSums<Sum>*>(first + int64_t{partials.slot(partial)} * kBlockM * kClusterN);
    }

    // Returns whether this cluster is the last to arrive among those that split the tile. The other clusters store
    // their partials, in the order of their registers, and then arrive. A cluster that finds all others arrived stores
    // nothing: it is the last.
    template <int kBlockM>
    FASTATTN_DEVICE bool collects(const MatmulEpilogue& epilogue, const Sum (&rY)[kBlockM / 2], int32_t tile, int rank,
                                  int rows_here) const {
        if (partials.count == 1) return true;
        uint64_t* arrivals = epilogue.arrivals + tile * kClusterSize + rank;
        bool is_last = threadIdx.x == 0 && arrives_if_last(arrivals, epilogue.launch_id, partials.count);
        if (ptx::bar_red_or(kBothConsumers, kConsumerThreads, is_last)) return true;
        if (threadIdx.x == 0) open_arrivals(arrivals, epilogue.launch_id);  // while other threads store their sums
        FourSums<Sum>* own_slot = slot<kBlockM>(own);
#pragma unroll
        for (int i = 0; i < kBlockM / kMmaN; ++i) {
            if (i * kMmaN < rows_here) {
                own_slot[i * kConsumerThreads] = {rY[4 * i], rY[4 * i + 1], rY[4 * i + 2], rY[4 * i + 3]};
            }
        }
        ptx::bar_sync(kBothConsumers, kConsumerThreads);  // waits until every thread has stored its sums
        is_last = threadIdx.x == 0 && arrives_last(arrivals, partials.count);
        return ptx::bar_red_or(kBothConsumers, kConsumerThreads, is_last);
    }

    // Adds up the partials of kTiles times 8 rows of M, from the first_tile-th 8 rows on, in a fixed order, so that
    // results repeat bit by bit. All loads of one partial are in flight together.
    template <int kBlockM, int kTiles>
    FASTATTN_DEVICE void add(FourSums<Sum> (&sums)[kTiles], const Sum (&rY)[kBlockM / 2], int first_tile,
                             int rows_here) const {
        const auto own_sums = [&](int i) -> FourSums<Sum> {
            const Sum* registers = rY + (first_tile + i) * 4;
            return {registers[0], registers[1], registers[2], registers[3]};
        };
        if (partials.count == 1) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) sums[i] = own_sums(i);
            return;
        }
#pragma unroll
        for (FourSums<Sum>& sum : sums) sum = {};
#pragma unroll 1
        for (int partial = 0; partial < partials.count; ++partial) {
            FourSums<Sum> more[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                more[i] = own_sums(i);
                if (partial != own && (first_tile + i) * kMmaN < rows_here) {
                    more[i] = __ldcg(slot<kBlockM>(partial) + (first_tile + i) * kConsumerThreads);
                }
            }
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                sums[i] = {sums[i].x + more[i].x, sums[i].y + more[i].y, sums[i].z + more[i].z, sums[i].w + more[i].w};
            }
        }
    }
};

// In the last cluster of a tile, writes a CTA's sums to the result. Called by all consumer threads. scaled(half, row,
// sum) returns the scaled sum for a row of M, counted in the tile, and for one of the thread's two columns of N.
// Position: ConsumerPosition, or another mapping of threads to columns.
template <DataType kDataType, typename Tile, typename Sum, typename Position, typename Scaled>
FASTATTN_DEVICE void finish_work_tile(const MatmulEpilogue& epilogue, ClusterStorage<Tile>& shared,
                                      const Sum (&rY)[Tile::kBlockM / 2], const MatmulWorkTile& work,
                                      const Position& consumer, Scaled&& scaled) {
    constexpr int kBlockM = Tile::kBlockM, kPassM = Tile::kPassM, kBatch = 4;
    constexpr int kRowElements = SumsLayout<kCtaN>::kRowElements;
    const CtaTile tile(epilogue.schedule, work, consumer.rank);
    const int rows_here = min(kBlockM, epilogue.out.rows - tile.m_tile * kBlockM);
    const ClusterPartials<Sum> partials(epilogue, work, consumer.rank, kBlockM);
    OwnColumns<kDataType, kCtaN, kConsumerThreads, /*kRowsAtOnce=*/2> own_columns;  // more would spill beside rY
    own_columns.load(epilogue, tile.n_tile);
    if (!partials.template collects<kBlockM>(epilogue, rY, work.tile, consumer.rank, rows_here)) return;
    float* sSums = shared.sums + accumulator_column(consumer.lane) * kRowElements + consumer.output(0);
    const auto store_sums = [&](auto pass) {
#pragma unroll
        for (int batch = 0; batch < kPassM / kMmaN; batch += kBatch) {
            const int first_tile = pass * (kPassM / kMmaN) + batch;
            FourSums<Sum> sums[kBatch];
            partials.template add<kBlockM>(sums, rY, first_tile, rows_here);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const Sum tile_sums[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int token = (first_tile + i) * kMmaN + accumulator_column(consumer.lane) + e;
                    const float halves[2] = {scaled(0, token, tile_sums[e]), scaled(1, token, tile_sums[e + 2])};
                    float* row = sSums + ((batch + i) * kMmaN + e) * kRowElements;
                    if constexpr (Position::kHalfDistance == 1) {
                        ptx::st_shared_v2_f32(shared_address(row), halves[0], halves[1]);
                    } else {
                        row[0] = halves[0];
                        row[Position::kHalfDistance] = halves[1];
                    }
                }
            }
        }
    };
#pragma unroll 1  // storing needs a copy of the code for each pass, because registers have no index; the rest needs one
    for (int pass = 0; pass * kPassM < rows_here; ++pass) {
        ptx::bar_sync(kBothConsumers, kConsumerThreads);  // waits until the sums of the pass before have been read
        for_constant<kBlockM / kPassM>([&](auto constant) {
            if (pass == constant) store_sums(constant);
        });
        ptx::bar_sync(kBothConsumers, kConsumerThreads);  // waits until every warp's sums are in shared memory
        own_columns.finish(epilogue, shared.sums, tile.m_tile * kBlockM + pass * kPassM,
                           min(kPassM, rows_here - pass * kPassM));
    }
}

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
