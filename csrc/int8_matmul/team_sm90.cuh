// What the Hopper kernels of the int8 matmul share: a team of two CTAs, the ring that brings its operands, and how sums in
// registers become the result.
//
// Threads of a CTA: two consumers, a warpgroup each with 64 of the CTA's 128 outputs, and a producer warpgroup, of which one
// thread copies by TMA and others may read what has landed. Each CTA copies its own weights, and half of the tokens into both CTAs; so a stage is empty when the
// consumers of both have read it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/arrivals.cuh"
#include "device/fragment.cuh"
#include "device/ptx/bulk_tensor.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/st_shared.cuh"
#include "device/ring.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/tensor_map.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/team_work.h"
#include "int8_matmul/tiles_sm90.h"

namespace fastattn {

struct TeamParams {
    Int8MatmulParams matmul;
    MatrixMap weight, tokens;
};

inline constexpr int kConsumerThreads = 2 * kWarpgroupSize;
inline constexpr int kAllConsumers = 1;  // a named barrier; 0 is that of __syncthreads()

// A stage holds [kBlockM, 128 bytes] of tokens, 128B swizzle, and then the weights.
template <typename Tile>
struct alignas(1024) TeamStorage {
    static constexpr int kTokenBytes = Tile::kBlockM * 128;

    char stages[Tile::kNumStages][Tile::kStageBytes];
    float sums[Tile::kPassTokens * SumsLayout<kCtaOutputs>::kRowElements];
    RingBarriers<Tile::kNumStages> ring;

    __device__ __forceinline__ uint32_t tokens(int stage) const { return shared_address(stages[stage]); }
    __device__ __forceinline__ const char* weights(int stage) const { return stages[stage] + kTokenBytes; }
};

__device__ __forceinline__ int32_t team_of_cta() {
    return static_cast<int32_t>(blockIdx.x / kTeamCtas);
}

__device__ __forceinline__ int32_t teams_of_launch() {
    return static_cast<int32_t>(gridDim.x / kTeamCtas);
}

// Waits until every thread of the team is here.
__device__ __forceinline__ void wait_for_team() {
    __syncwarp();  // the barrier takes whole warps
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

// All threads, before anybody uses the ring. Of a CTA, so many warps read a stage, and so many threads tell that they have filled
// their part of it.
template <typename Tile>
__device__ __forceinline__ void start_team(TeamStorage<Tile>& shared, int num_readers = Tile::kNumConsumers * 4,
                                           int num_writers = 1) {
    if (threadIdx.x == 0) {
        shared.ring.init(kTeamCtas * num_readers, num_writers);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();  // waits until the barriers are initialised
    wait_for_team();  // waits until those of the other CTA are
}

// A CTA's part of a tile.
struct CtaTile {
    int32_t token_tile;
    int32_t output_tile;  // of 128 outputs

    __device__ __forceinline__ CtaTile(const MatmulPlan& plan, const MatmulWork& work, int rank) {
        const TilePosition position = tile_position(plan, work.tile);
        token_tile = position.token_tile;
        output_tile = position.output_tile * kTeamCtas + rank;
    }
};

// The producer, one thread: calls load_weights(tile, step, destination, barrier) for each step of each piece of work, which
// starts copies of kWeightBytes, and copies this CTA's half of the tokens into both CTAs.
template <typename Tile, typename LoadWeights>
__device__ __forceinline__ void produce_for_team(TeamStorage<Tile>& shared, const TeamParams& params, int rank,
                                                 int token_columns, LoadWeights&& load_weights) {
    constexpr int kRows = Tile::kBlockM / kTeamCtas;
    const MatmulPlan& plan = params.matmul.epilogue.plan;
    Ring<Tile::kNumStages> ring(shared.ring);
    MatmulWork work;
    for (bool has_work = first_piece(plan, team_of_cta(), work); has_work;
         has_work = next_piece(plan, team_of_cta(), teams_of_launch(), work)) {
        const CtaTile tile(plan, work, rank);
        const int32_t first_token = tile.token_tile * Tile::kBlockM + rank * kRows;
#pragma unroll 1  // unrolled it has too few registers
        for (int32_t step = work.begin_step; step < work.end_step; ++step) {
            const uint32_t landed = ring.acquire(Tile::kStageBytes), stage = shared.tokens(ring.stage);
            load_weights(tile, step, stage + TeamStorage<Tile>::kTokenBytes, landed);
            ptx::cp_async_bulk_tensor_2d_multicast(stage + rank * kRows * 128, &params.tokens.encoded,
                                                   step * token_columns, first_token, landed, /*ctas=*/0b11);
            ring.advance();
        }
    }
}

// A consumer's place in its CTA.
struct TeamConsumer {
    static constexpr int kHalfDistance = 8;  // of a thread's two outputs
    int warpgroup, warp, lane, rank;

    __device__ __forceinline__ int first_of_warp() const { return warpgroup * kWarpgroupM + warp * kMmaM; }

    // Of the CTA's outputs, of register half h of an accumulator: see device/ptx/wgmma.cuh.
    __device__ __forceinline__ int output(int half) const {
        return first_of_warp() + accumulator_row(lane) + kHalfDistance * half;
    }
};

// Operands A of a step, which a consumer decodes into registers: rW[k] for each 16 of the sum.
template <typename Tile>
using StepWeights = uint32_t[Tile::kBlockK / kMmaK][4];

// rY += W · Xᵀ over kDepth of the sum from first_k on, or rY = W · Xᵀ; runs on.
template <DataType kDataType, int kDepth, bool kAdds, typename Tile>
__device__ __forceinline__ void start_products(float (&rY)[Tile::kBlockM / 2], const StepWeights<Tile>& rW,
                                               OperandDescriptor sX, int first_k = 0) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = first_k / kMmaK; k < (first_k + kDepth) / kMmaK; ++k) {
        ptx::Wgmma<Tile::kBlockM, kDataType>::rs_rows(rY, rW[k], sX.at(k * kMmaK * 2), kAdds || k > first_k / kMmaK);
    }
    ptx::wgmma_commit_group();
}

// One consumer's side of the ring, where it decodes operands A: which operands are next, and which stage it releases next.
template <DataType kDataType, typename Tile>
struct DecodingConsumer {
    TeamStorage<Tile>& shared;
    int lane;
    Ring<Tile::kNumStages> ring, ahead;

    __device__ __forceinline__ DecodingConsumer(TeamStorage<Tile>& shared, int lane)
        : shared(shared), lane(lane), ring(shared.ring), ahead(shared.ring) {}

    __device__ __forceinline__ OperandDescriptor tokens(int stage) const {
        return OperandDescriptor::of_rows(shared.tokens(stage));
    }

    __device__ __forceinline__ void release() { ring.release_to_cluster(lane, kTeamCtas); }

    // rY += the products of a piece of work. Those of two steps are in flight, but for a moment between them. decode(rW): makes
    // operands of what stage `ahead` holds, once it has landed.
    template <typename Decode>
    __device__ __forceinline__ void sum(float (&rY)[Tile::kBlockM / 2], int32_t num_steps, Decode&& decode) {
        StepWeights<Tile> rW[2];
        const auto start = [&](const StepWeights<Tile>& rW) {
            start_products<kDataType, Tile::kBlockK, true, Tile>(rY, rW, tokens(ahead.stage));
            ahead.advance();
        };
        // Decodes the weights of one more step where those of the step before have been.
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
        ptx::wgmma_wait_group<0>();  // leaves none in flight
        ptx::written_by_wgmma(rY);
        if (num_steps > 1) release();
        release();
    }
};

// Of a thread.
template <typename Sum>
using FourSums = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;

// The parts of a tile's sum, for one CTA of the team that adds them up. Sum: float or int32_t.
template <typename Sum>
struct PartsOfTeams {
    SumParts parts;
    int own;
    float* first;  // this thread's numbers in the first slot

    __device__ __forceinline__ PartsOfTeams(const MatmulEpilogue& epilogue, const MatmulWork& work, int rank,
                                            int block_m)
        : parts{0, 1, 0}, own(0), first(nullptr) {
        if (is_whole(epilogue.plan, work)) return;
        parts = sum_parts(epilogue.plan, work.tile);
        own = team_of_cta() - parts.first_cta;
        first = epilogue.partial + rank * block_m * kCtaOutputs + threadIdx.x * 4;
    }

    // Neighbouring threads have neighbouring numbers, 16 bytes each.
    template <int kBlockM>
    __device__ __forceinline__ FourSums<Sum>* slot(int part) const {
        return reinterpret_cast<FourSums<Sum>*>(first + int64_t{parts.slot(part)} * kBlockM * kTeamOutputs);
    }

    // Leaves this team's part, registers as they are, if it is not the last: true for the last, which leaves none if all others
    // have left theirs before.
    template <int kBlockM>
    __device__ __forceinline__ bool collects(const MatmulEpilogue& epilogue, const Sum (&rY)[kBlockM / 2], int32_t tile,
                                             int rank, int rows_here) const {
        if (parts.count == 1) return true;
        uint64_t* arrivals = epilogue.arrivals + tile * kTeamCtas + rank;
        bool is_last = threadIdx.x == 0 && others_have_arrived(arrivals, epilogue.token, parts.count);
        if (ptx::bar_red_or(kAllConsumers, kConsumerThreads, is_last)) return true;
        if (threadIdx.x == 0) open_arrivals(arrivals, epilogue.token);  // while others store
        FourSums<Sum>* own_slot = slot<kBlockM>(own);
#pragma unroll
        for (int i = 0; i < kBlockM / kMmaN; ++i) {
            if (i * kMmaN < rows_here) {
                own_slot[i * kConsumerThreads] = {rY[4 * i], rY[4 * i + 1], rY[4 * i + 2], rY[4 * i + 3]};
            }
        }
        ptx::bar_sync(kAllConsumers, kConsumerThreads);  // waits until every thread has stored its share of this part
        is_last = threadIdx.x == 0 && arrives_last(arrivals, parts.count);
        return ptx::bar_red_or(kAllConsumers, kConsumerThreads, is_last);
    }

    // The whole sums of kTiles times 8 tokens from tile `first_tile` on, in the order of the parts, so that bits repeat. The loads
    // of a part are all on their way at a time.
    template <int kBlockM, int kTiles>
    __device__ __forceinline__ void add(FourSums<Sum> (&sums)[kTiles], const Sum (&rY)[kBlockM / 2], int first_tile,
                                        int rows_here) const {
#pragma unroll
        for (FourSums<Sum>& sum : sums) sum = {};
#pragma unroll 1
        for (int part = 0; part < parts.count; ++part) {
            FourSums<Sum> more[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const Sum* registers = rY + (first_tile + i) * 4;
                more[i] = {registers[0], registers[1], registers[2], registers[3]};
                if (part != own && (first_tile + i) * kMmaN < rows_here) {
                    more[i] = __ldcg(slot<kBlockM>(part) + (first_tile + i) * kConsumerThreads);
                }
            }
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                sums[i] = {sums[i].x + more[i].x, sums[i].y + more[i].y, sums[i].z + more[i].z, sums[i].w + more[i].w};
            }
        }
    }
};

// A CTA's sums into the result, by the team that has the last of a tile's parts. scaled(half, token, sum): what becomes of a
// sum on its way, of one of the thread's two outputs; `token` counts in the tile. Place: TeamConsumer, or what says otherwise
// which outputs the thread has.
template <DataType kDataType, typename Tile, typename Sum, typename Place, typename Scaled>
__device__ __forceinline__ void finish_piece(const MatmulEpilogue& epilogue, TeamStorage<Tile>& shared,
                                             const Sum (&rY)[Tile::kBlockM / 2], const MatmulWork& work,
                                             const Place& consumer, Scaled&& scaled) {
    constexpr int kBlockM = Tile::kBlockM, kPassTokens = Tile::kPassTokens, kBatch = 4;
    constexpr int kRowElements = SumsLayout<kCtaOutputs>::kRowElements;
    const CtaTile tile(epilogue.plan, work, consumer.rank);
    const int rows_here = min(kBlockM, epilogue.out.rows - tile.token_tile * kBlockM);
    const PartsOfTeams<Sum> parts(epilogue, work, consumer.rank, kBlockM);
    if (!parts.template collects<kBlockM>(epilogue, rY, work.tile, consumer.rank, rows_here)) return;
    float* sSums = shared.sums + accumulator_column(consumer.lane) * kRowElements + consumer.output(0);
#pragma unroll
    for (int pass = 0; pass < kBlockM / kPassTokens; ++pass) {
        if (pass * kPassTokens >= rows_here) break;
        ptx::bar_sync(kAllConsumers, kConsumerThreads);  // waits until the sums of the pass before have been read
#pragma unroll
        for (int batch = 0; batch < kPassTokens / kMmaN; batch += kBatch) {
            const int first_tile = pass * (kPassTokens / kMmaN) + batch;
            FourSums<Sum> sums[kBatch];
            parts.template add<kBlockM>(sums, rY, first_tile, rows_here);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const Sum of_tile[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int token = (first_tile + i) * kMmaN + accumulator_column(consumer.lane) + e;
                    const float of_halves[2] = {scaled(0, token, of_tile[e]), scaled(1, token, of_tile[e + 2])};
                    float* row = sSums + ((batch + i) * kMmaN + e) * kRowElements;
                    if constexpr (Place::kHalfDistance == 1) {
                        ptx::st_shared_v2_f32(shared_address(row), of_halves[0], of_halves[1]);
                    } else {
                        row[0] = of_halves[0];
                        row[Place::kHalfDistance] = of_halves[1];
                    }
                }
            }
        }
        ptx::bar_sync(kAllConsumers, kConsumerThreads);  // waits until every warp's sums are there
        const TilePosition position{tile.token_tile * (kBlockM / kPassTokens) + pass, tile.output_tile};
        for_own_chunks<kPassTokens, kCtaOutputs, kConsumerThreads>(
            epilogue, shared.sums, position, [&](const ChunkSums& sums, int64_t row, int32_t column) {
                finish<kDataType>(epilogue, sums, row, column);
            });
    }
}

// Of a CTA, as the library lists them. is_gradient: its outputs are columns of K, and a step takes some of N.
template <typename Tile>
constexpr Int8TileFacts team_tile_facts(bool is_gradient = false) {
    const MatmulTile tile = Tile::kMatmulTile;
    const int32_t block_n = is_gradient ? tile.depth : kCtaOutputs, block_k = is_gradient ? kCtaOutputs : tile.depth;
    return {{tile.tokens, block_n, block_k, Tile::kNumWarps, tile.ctas_per_sm}, tile};
}

// One team for each piece of work at a time, at most as many as run at a time.
template <typename Tile, typename Storage = TeamStorage<Tile>>
void launch_team(LaunchedKernel& kernel, void (*function)(TeamParams), const TeamParams& params, int32_t num_sms,
                 Stream stream) {
    const Launch launch{int64_t{kTeamCtas} * num_teams(params.matmul.epilogue.plan, num_sms / kTeamCtas),
                        Tile::kNumThreads, sizeof(Storage), kTeamCtas};
    kernel.launch(function, launch, params, stream);
}

}  // namespace fastattn
