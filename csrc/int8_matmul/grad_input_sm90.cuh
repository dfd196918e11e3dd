// Input gradient of the matmul with int8 weights for Hopper: dX[M, K] = dY[M, N] · W, W = scale * int8[N, K],
// row-major.
//
// The tile is computed transposed, Wᵀ · dYᵀ: columns of dX are wgmma's M, and rows of dX wgmma's N. A cluster has 256
// columns and kBlockM rows (cluster_sm90.cuh). A consumer has 64 of the columns. Each of its warps has 16 of them,
// which belong to one group of scales. Warps of a third warpgroup serve a CTA's two consumers:
//
//   producer      one thread copies W and dY by TMA into the ring's stages
//   factors       a warp makes 16-bit factors of a step's scales (scale_factors_sm90.cuh) in the same stage
//   token sums    a warp adds up the tokens of dY, if the gradient of a bias is wanted (token_sums_sm90.cuh)
//
//   ring, stages               full: W and dY have landed, factors are made  empty: the readers of both CTAs are done
//   W, dY, factors kNumStages  before W becomes 16-bit floats                after the products
//
// A step takes 64 of N. ldmatrix.trans loads a warp's int8 weights as if two adjacent columns were one 16-bit element:
// a lane gets two columns at two adjacent n. Rows g and g + 8 of wgmma's operand A are then columns 2g and 2g + 1. The
// products of a step are in flight while the weights of the next step become 16-bit floats, as in gemm_sm90.cuh.
//
// Scales differ along N, over which the product sums. As in grad_input_sm80.cuh, they multiply the weights, and are
// relative to a power of two, the divisor, which follows the largest scale so far. The divisor seldom changes. When it
// does, the warp that makes factors marks the step. The consumers then wait for their products, and convert their sums
// to the new divisor. Converting a pair of weights costs 0.5 LOP3, 1 PRMT, 0.125 LDSM, and HFMA2: 2 with fp16, 1 with
// bf16. Preconditions: those of gemm_sm90.cuh.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/shared_memory.h"
#include "device/swizzle.cuh"
#include "host/device_facts.h"
#include "host/launch.h"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/epilogue_sm90.cuh"
#include "int8_matmul/scale_factors_sm90.cuh"
#include "int8_matmul/token_sums_sm90.cuh"

namespace fastattn {

template <DataType kDataType, typename Tile>
struct GradInputStorageSm90 : ClusterStorage<Tile> {
    StepFactors<kDataType> factors[Tile::kNumStages];
    ScaleSteps scales;
};

// Decodes the operands A of a step. sW: the lane's ldmatrix address in the first 32 rows of the step's weights, [64,
// 128] int8 in TMA's 128-byte swizzle.
template <DataType kDataType, typename Tile>
FASTATTN_DEVICE void decode_columns(StepWeights<Tile>& rW, uint32_t sW, const StepFactors<kDataType>& factors,
                                    int group, int lane) {
    using Decoding = ScaledDecoding<kDataType>;
    constexpr int kRows = 4 * kMmaN;  // that one ldmatrix loads
    uint32_t rFactors[StepFactors<kDataType>::kLaneWords];
    factors.load(rFactors, group, lane);
#pragma unroll
    for (int n = 0; n < kStepN; n += kRows) {
        uint32_t rBytes[4];
        ptx::ldmatrix_m8n8_x4_trans(rBytes, sW + n * kCtaN);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int eight = n / kMmaN + i;
            const uint32_t four = biased(rBytes[i]), *own = rFactors + eight * Decoding::kWords;
            rW[eight / 2][eight % 2 * 2] = Decoding::template decode<0, 2>(four, own);
            rW[eight / 2][eight % 2 * 2 + 1] = Decoding::template decode<1, 3>(four, own);
        }
    }
}

template <int kBlockM, DataType kDataType>
__global__ void __launch_bounds__(Int8GradInputTileSm90<kBlockM>::kNumThreads, 1)
    int8_matmul_grad_input_sm90(const __grid_constant__ ClusterParams params) {
    using Tile = Int8GradInputTileSm90<kBlockM>;
    using Range = FactorRange<ScaledDecoding<kDataType>::kEnd>;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<GradInputStorageSm90<kDataType, Tile>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const MatmulEpilogue epilogue = rounding_only(params.matmul.epilogue);
    const MatmulSchedule& schedule = epilogue.schedule;
    const bool sums_tokens = params.matmul.token_sums.out != nullptr;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int rank = ptx::cluster_ctarank();
    start_cluster(shared, Tile::kNumConsumers * 4 + sums_tokens, /*num_writers=*/2);

    // Producer, factors, token sums.
    if (warpgroup == Tile::kNumConsumers) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0 && lane == 0) {
            produce_for_cluster(shared, params, rank, Tile::kBlockK,
                                [&](const CtaTile& tile, int32_t step, uint32_t destination, uint32_t landed) {
                                    ptx::cp_async_bulk_tensor_2d(destination, &params.weight.encoded,
                                                                 tile.n_tile * kCtaN, step * kStepN, landed);
                                });
        } else if (warp == 1) {
            make_factors<kDataType, Tile>(shared.ring, shared.factors, shared.scales, params, rank, lane);
        } else if (warp == 2 && sums_tokens) {
            sum_tokens<kDataType>(shared, params, rank, lane);
        }
        leave_cluster();
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    const AdjacentPosition position{{warpgroup, warp, lane, rank}};  // because ldmatrix.trans loads the weights
    const int group = position.first_of_warp() / Int8WeightView::kSmallestGroup >> params.matmul.weight.group_shift;
    const uint32_t lane_offset = Swizzle<kStepN>::offset(lane, position.first_of_warp() / kChunkBytes);
    DecodingConsumer<kDataType, Tile> consumer(shared, lane);
    int next_buffer = 0;
    // Forces inlining, however long the lambda is: ptxas would serialise wgmma in a separate function.
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) __attribute__((always_inline)) {
        float rX[kBlockM / 2];  // [64 columns, kBlockM tokens] of the warpgroup, in units of divisor
#pragma unroll
        for (float& sum : rX) sum = 0.0f;
        ptx::written_by_wgmma(rX);
        float divisor = 1.0f;
        consumer.sum(rX, warp_uniform(work.end_step - work.begin_step), [&](StepWeights<Tile>& rW) {
            const int stage = consumer.ahead.stage;
            const StepFactors<kDataType>& factors = shared.factors[stage];
            consumer.ahead.wait_full();
            decode_columns<kDataType, Tile>(rW, shared_address(shared.weights(stage)) + lane_offset, factors, group,
                                            lane);
            if (__any_sync(0xffffffff, factors.has_changed)) {
                const float change = Range::change(divisor, factors.divisors[group]);
                divisor = factors.divisors[group];
                wait_gemm<0>(rX);  // leaves none in flight; their sums use the former divisor
#pragma unroll
                for (int i = 0; i < kBlockM / 2; ++i) rX[i] *= change;
            }
        });

        // Epilogue.
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) rX[i] *= divisor;  // before kFactor: divisor * kFactor may overflow
        finish_work_tile<kDataType>(epilogue, params.result, shared, rX, work, position, next_buffer,
                                    [](int, int, float sum) { return sum * ScaledDecoding<kDataType>::kFactor; });
    });
    ptx::cp_async_bulk_wait_group_read();  // the buffers must exist until TMA has read them
    leave_cluster();
}

template <int kBlockM, DataType kDataType>
void launch_int8_matmul_grad_input_sm90(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Tile = Int8GradInputTileSm90<kBlockM>;
    const Int8WeightView& weight = params.weight;
    const ClusterParams all_params{
        params, matrix_map(weight.data, 1, weight.rows, weight.columns, weight.row_stride, kStepN, kCtaN),
        matrix_map(params.input.data, 2, params.input.rows, params.input.columns, params.input.row_stride * 2,
                   kBlockM / kClusterSize, Tile::kBlockK),
        result_map<Tile>(params.epilogue.out)};
    launch_clusters<Tile, GradInputStorageSm90<kDataType, Tile>>(
        kernel, int8_matmul_grad_input_sm90<kBlockM, kDataType>, all_params, device_facts().num_sms, stream);
}

}  // namespace fastattn
