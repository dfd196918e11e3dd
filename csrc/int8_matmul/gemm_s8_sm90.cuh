// Matmul with int8 weights and int8 activations for Hopper: Y[M, N] = act(Xq · Wᵀ + bias) + residual. Xq is X[M, K]
// rounded to int8 with a scale per token, by a kernel before this one (quantize_tokens_sm90.cuh). W = scale * int8[N,
// K], row-major.
//
// As in gemm_sm90.cuh, a cluster computes W · Xqᵀ, one work tile after another: a tile of 256 columns and kBlockM rows
// of the result, or a split of such a tile. In a CTA, one thread produces and two warpgroups consume. Unlike there,
// both operands go from shared memory to wgmma without conversion:
//
//   ring, stages       full: its bytes have landed    empty: the consumers of both CTAs have multiplied it
//   W, Xq  kNumStages  before its products            after them
//
// The products of two steps are in flight: those of the next step are started while the tensor cores compute those of
// this step. Sums are int32, which is exact up to kMostInt8SumK of K, so that splits of a tile do not change the
// result. With scales per group along K, the sums of each group are scaled and added in fp32, in a second set of
// accumulators. Meanwhile the tensor cores work for the other consumer.
//
// Preconditions: those of Int8WeightView; N a multiple of 8; K a multiple of 16 and at most kMostInt8SumK; no SwiGLU.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/shared_memory.h"
#include "host/device_facts.h"
#include "host/launch.h"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/epilogue_sm90.cuh"

namespace fastattn {

inline constexpr int kS8WgmmaK = 32;  // no group of scales is smaller

template <typename Tile>
struct S8ClusterStorage : ClusterStorage<Tile> {
    float token_scales[Tile::kBlockM];
};

// One consumer's side of the ring. ahead: the stage whose products start next. ring: the stage to release next.
template <typename Tile>
struct S8Consumer {
    using Sums = int32_t[Tile::kBlockM / 2];

    ClusterStorage<Tile>& shared;
    ConsumerPosition position;
    Ring<Tile::kNumStages> ring, ahead;

    FASTATTN_DEVICE S8Consumer(ClusterStorage<Tile>& shared, const ConsumerPosition& position)
        : shared(shared), position(position), ring(shared.ring), ahead(shared.ring) {}

    // Starts rY += W · Xqᵀ, or rY = W · Xqᵀ without kAdds, over kSumK of a step's K from first_k on. The products run
    // asynchronously.
    template <int kSumK, bool kAdds>
    FASTATTN_DEVICE void start(Sums& rY, int stage, int first_k = 0) const {
        const int own_rows = position.warpgroup * kWarpgroupM * Tile::kBlockK;
        const auto sX = OperandDescriptor::k_major(shared.input(stage));
        const auto sW = OperandDescriptor::k_major(shared.input(stage) + ClusterStorage<Tile>::kInputBytes + own_rows);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = first_k; k < first_k + kSumK; k += kS8WgmmaK) {
            ptx::WgmmaS8<Tile::kBlockM>::ss(rY, sW.at(k), sX.at(k), kAdds || k > first_k);
        }
        ptx::wgmma_commit_group();
    }

    FASTATTN_DEVICE void release() { ring.release_to_cluster(position.lane, kClusterSize); }

    // Adds the products of a work tile to rY. The work tile has at least one step.
    FASTATTN_DEVICE void sum(Sums& rY, int32_t num_steps) {
        const auto start_next = [&] {
            ahead.wait_full();
            start<Tile::kBlockK, true>(rY, ahead.stage);
            ahead.advance();
        };
        start_next();
#pragma unroll 1
        for (int32_t step = 1; step < num_steps; ++step) {
            start_next();
            ptx::wgmma_wait_group<1>();  // leaves the products of this step in flight
            release();
        }
        wait_gemm<0>(rY);  // leaves none in flight
        release();
    }

    // Does the same with a scale for each kGroupK (32, 64 or 128) of K. scale(half, first_k) returns the scale for one
    // of the thread's two columns of N; first_k counts from the work tile's first step. The scales of a step are loaded
    // one step before.
    template <int kGroupK, typename Scale>
    FASTATTN_DEVICE void sum_groups(float (&rY)[Tile::kBlockM / 2], int32_t num_steps, Scale&& scale) {
        constexpr int kGroups = Tile::kBlockK / kGroupK;
        float scales[kGroups][2], next[kGroups][2];
        const auto load = [&](int32_t step) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                next[group][0] = scale(0, step * Tile::kBlockK + group * kGroupK);
                next[group][1] = scale(1, step * Tile::kBlockK + group * kGroupK);
            }
        };
        load(0);
#pragma unroll 1
        for (int32_t step = 0; step < num_steps; ++step) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
                scales[group][0] = next[group][0], scales[group][1] = next[group][1];
            ring.wait_full();
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                Sums rGroup;
                start<kGroupK, false>(rGroup, ring.stage, group * kGroupK);
                if (group == 0) load(step + 1);
                wait_gemm<0>(rGroup);  // leaves none in flight
                if (group == kGroups - 1) release();
#pragma unroll
                for (int i = 0; i < Tile::kBlockM / 2; ++i) {
                    rY[i] += static_cast<float>(rGroup[i]) * scales[group][i / 2 % 2];
                }
            }
        }
    }
};

template <int kBlockM, DataType kDataType, bool kIsGrouped>
__global__ void __launch_bounds__(Int8MatmulS8TileSm90<kBlockM>::kNumThreads, 1)
    int8_matmul_s8_sm90(const __grid_constant__ ClusterParams params) {
    using Tile = Int8MatmulS8TileSm90<kBlockM>;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<S8ClusterStorage<Tile>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);
    static_assert(kBlockM <= kConsumerThreads, "a thread copies each token's scale");

    // Prologue.
    const MatmulEpilogue& epilogue = params.matmul.epilogue;
    const Int8WeightView& weight = params.matmul.weight;
    const MatmulSchedule& schedule = epilogue.schedule;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int rank = ptx::cluster_ctarank();
    start_cluster(shared);

    // Producer.
    if (warpgroup == Tile::kNumConsumers) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0 && lane == 0) {
            produce_for_cluster</*kIsDependent=*/true>(
                shared, params, rank, Tile::kBlockK,
                [&](const CtaTile& tile, int32_t step, uint32_t destination, uint32_t landed) {
                    ptx::cp_async_bulk_tensor_2d(destination, &params.weight.encoded, step * Tile::kBlockK,
                                                 tile.n_tile * kCtaN, landed);
                });
        }
        leave_cluster();
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    ptx::griddepcontrol_wait();  // waits for the tokens' scales, and until the result's memory is free
    const ConsumerPosition position{warpgroup, warp, lane, rank};
    S8Consumer<Tile> consumer(shared, position);
    int next_buffer = 0;
    // Forces inlining, however long the lambda is: ptxas would serialise wgmma in a separate function.
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) __attribute__((always_inline)) {
        const CtaTile tile(schedule, work, rank);
        const ColumnTerms<kDataType> terms(epilogue, tile, position);
        const int32_t num_steps = warp_uniform(work.end_step - work.begin_step);
        const int32_t token = tile.m_tile * kBlockM + static_cast<int32_t>(threadIdx.x);
        float token_scale = 0.0f;
        if (threadIdx.x < kBlockM && token < epilogue.out.rows)
            token_scale = params.matmul.quantized.scale[token];  // no __ldg: written while this kernel runs
        const float* gScale[2];  // of the thread's columns of N; any scale for a column that does not exist
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t row = min(tile.n_tile * kCtaN + position.output(half), weight.rows - 1);
            gScale[half] = weight.scale + int64_t{row} * weight.scale_row_stride;
        }

        // Multiplies by the weights' scales first: the tokens' scales may be so large that the sums would overflow.
        const auto finish = [&](auto& rY, float first_scale, float second_scale) {
            if (threadIdx.x < kBlockM) shared.token_scales[threadIdx.x] = token_scale;
            ptx::bar_sync(kBothConsumers, kConsumerThreads);  // waits until every token's scale is in shared memory
            const float bias[2] = {terms.bias(0), terms.bias(1)};
            finish_work_tile<kDataType, Tile>(
                epilogue, params.result, shared, rY, work, position, next_buffer, [&](int half, int token, auto sum) {
                    const float scaled = static_cast<float>(sum) * (half == 0 ? first_scale : second_scale);
                    return fmaf(scaled, shared.token_scales[token], bias[half]);
                });
        };
        if constexpr (kIsGrouped) {
            const int32_t begin_k = work.begin_step * Tile::kBlockK;
            const auto scale = [&](int half, int32_t k) {
                const int32_t group = (begin_k + k) / kS8WgmmaK >> weight.group_shift;
                return group < weight.groups ? __ldg(gScale[half] + group) : 0.0f;
            };
            float rY[kBlockM / 2] = {};  // [64 of N, kBlockM] of the warpgroup
            if (weight.group_shift == 0) {
                consumer.template sum_groups<32>(rY, num_steps, scale);
            } else if (weight.group_shift == 1) {
                consumer.template sum_groups<64>(rY, num_steps, scale);
            } else {
                consumer.template sum_groups<128>(rY, num_steps, scale);
            }
            finish(rY, 1.0f, 1.0f);
        } else {
            int32_t rY[kBlockM / 2] = {};
            ptx::written_by_wgmma(rY);
            consumer.sum(rY, num_steps);
            finish(rY, __ldg(gScale[0]), __ldg(gScale[1]));
        }
    });
    ptx::cp_async_bulk_wait_group_read();  // the buffers must exist until TMA has read them
    leave_cluster();
}

template <int kBlockM, DataType kDataType, bool kIsGrouped>
void launch_int8_matmul_s8_sm90(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Tile = Int8MatmulS8TileSm90<kBlockM>;
    const Int8WeightView& weight = params.weight;
    const ClusterParams all_params{
        params, matrix_map(weight.data, 1, weight.rows, weight.columns, weight.row_stride, kCtaN, Tile::kBlockK),
        matrix_map(params.quantized.data, 1, params.input.rows, params.input.columns, params.input.columns,
                   kBlockM / kClusterSize, Tile::kBlockK),
        result_map<Tile>(params.epilogue.out)};
    launch_clusters<Tile, S8ClusterStorage<Tile>>(kernel, int8_matmul_s8_sm90<kBlockM, kDataType, kIsGrouped>,
                                                  all_params, device_facts().num_sms, stream, /*is_dependent=*/true);
}

}  // namespace fastattn
