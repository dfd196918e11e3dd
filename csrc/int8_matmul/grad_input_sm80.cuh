// Input gradient of the matmul with int8 weights: dX[M, K] = dY[M, N] · W, W = scale * int8[N, K], row-major.
//
// The tile is computed transposed, Wᵀ · dYᵀ. One CTA computes kBlockK columns and kBlockM rows of dX over its split of
// N. Each warp owns 32 of the columns. ldmatrix.trans loads their int8 weights as if two adjacent columns were one
// 16-bit element: a lane gets two columns at two adjacent n. The kernel converts each weight once, in registers
// (device/dequantize.cuh). The pipeline is that of gemm_sm80.cuh.
//
// Scales differ along N, over which the product sums. So the sums cannot be scaled: an operand must be, and is then
// rounded to 16 bits. The kernel scales the weights, as if they were stored dequantised. It does not scale dY, because
// gradients times a scale such as 1e-3 would fall below fp16's normal range. For the same reason, factors in fp16 are
// relative to the largest scale so far (factor_range.cuh). Converting a pair of weights costs 0.5 LOP3, 1 PRMT and 2
// HFMA2, one of which multiplies by the scales. The gradient of a bias, dY summed over the tokens, is computed from the
// same stages: token_sums.cuh. Preconditions: those of gemm_sm80.cuh.
#pragma once

#include "device/dequantize.cuh"
#include "device/fragment.cuh"
#include "device/pipeline.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/shared_memory.h"
#include "device/stream_copy.cuh"
#include "device/swizzle.cuh"
#include "host/host_device.h"
#include "host/launch.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/factor_range.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/tiles_sm80.h"
#include "int8_matmul/token_sums.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

template <int kBlockM_>
struct Int8GradInputConfigSm80 : Int8GradInputTileSm80<kBlockM_> {
    using Tile = Int8GradInputTileSm80<kBlockM_>;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kWarpK = Tile::kBlockK / Tile::kNumWarps;
    static constexpr int kTilesK = kWarpK / kMmaM;         // K is the MMA's M
    static constexpr int kTilesM = Tile::kBlockM / kMmaN;  // M is its N
    static constexpr int kSmallestGroup = Int8WeightView::kSmallestGroup;
    static constexpr int kMostGroups = Tile::kBlockK / kSmallestGroup;
    static_assert(kWarpK == kSmallestGroup, "one ldmatrix takes a warp's columns, and they share a group");
    static_assert(kNumThreads % Tile::kBlockN == 0, "a thread copies scales of one n");
};

using SwizzledLayout = Swizzle<64>;  // of 16 bits: rows of 128 bytes

template <typename Config>
struct alignas(128) Int8GradInputStageSm80 {
    uint16_t sW[Config::kBlockN * SwizzledLayout::kRowElements];   // [kBlockN, kBlockK] int8
    uint16_t sdY[Config::kBlockM * SwizzledLayout::kRowElements];  // [kBlockM, kBlockN]: dY
    float sScale[Config::kMostGroups][Config::kBlockN];            // scales of the groups of the tile's columns
    static_assert(Config::kBlockK == SwizzledLayout::kRowBytes && Config::kBlockN == SwizzledLayout::kRowElements);
};

template <typename Config>
union alignas(128) Int8GradInputStorageSm80 {
    Int8GradInputStageSm80<Config> stages[Config::kNumStages];
    float sums[Config::kBlockM * SumsLayout<Config::kBlockK>::kRowElements];  // after the last step
};

// Converts scales to a warp's 16-bit factors. In fp16, a factor is a scale divided by range.divisor, and the warp's
// sums are in units of this divisor. bf16 needs no divisor, because it has the range of fp32.
template <DataType kDataType>
struct WarpFactors {
    static constexpr bool kHasRange = kDataType == DataType::kFloat16;

    FactorRange<256> range;  // a factor times 128 is within fp16's range

    FASTATTN_DEVICE float divisor() const { return kHasRange ? range.divisor : 1.0f; }
    FASTATTN_DEVICE float to_factor() const { return kHasRange ? range.to_factor() : 1.0f; }

    // Adapts the range, and the sums rX, to the 2 * kWarpSize scales of a step.
    template <int kTilesK, int kTilesM>
    FASTATTN_DEVICE void follow(const float* sScale, float (&rX)[kTilesK][kTilesM][4], int lane) {
        if constexpr (!kHasRange) return;
        const float2 own = reinterpret_cast<const float2*>(sScale)[lane];
        const float largest = largest_of(own);
        if (!__any_sync(0xffffffff, !range.holds(largest))) return;
        const float change = range.make_room(largest_of_warp(largest));
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) rX[k][m][e] *= change;
            }
        }
    }
};

// rX[kTilesK][kTilesM] += Wᵀ · dYᵀ over one stage, for the warp whose columns start at warp_k.
template <DataType kDataType, typename Config>
FASTATTN_DEVICE void multiply_stage(float (&rX)[Config::kTilesK][Config::kTilesM][4], WarpFactors<kDataType>& factors,
                                    const Int8GradInputStageSm80<Config>& stage, int warp_k, int group, int lane) {
    constexpr int kTilesK = Config::kTilesK, kTilesM = Config::kTilesM;
    static_assert(Config::kBlockN == 2 * kWarpSize, "a lane looks at two of a step's scales");
    factors.follow(stage.sScale[group], rX, lane);
    const float to_factor = factors.to_factor();
    const SwizzledBlocks<SwizzledLayout::kRowElements> sW(stage.sW, ldmatrix_lane(lane));
    const SwizzledBlocks<SwizzledLayout::kRowElements> sdY(stage.sdY, ldmatrix_lane_b(lane));
    const float* sScale = stage.sScale[group] + accumulator_column(lane);
#pragma unroll
    for (int n = 0; n < Config::kBlockN; n += kMmaK) {
        uint32_t rBytes[4];       // [2 * k + half]: 16 columns of W by 8 rows n, int8
        uint32_t rW[kTilesK][4];  // operands A
        ptx::ldmatrix_m8n8_x4_trans(rBytes, sW.address(n, warp_k / 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* scale = sScale + n + 8 * half;
            const uint32_t pair = pack<kDataType>(scale[0] * to_factor, scale[1] * to_factor);
#pragma unroll
            for (int k = 0; k < kTilesK; ++k) {
                const uint32_t four = biased(rBytes[2 * k + half]);
                rW[k][2 * half] = multiply_pairs<kDataType>(decode_pair<kDataType, 0, 2>(four), pair);
                rW[k][2 * half + 1] = multiply_pairs<kDataType>(decode_pair<kDataType, 1, 3>(four), pair);
            }
        }
#pragma unroll
        for (int m = 0; m < kTilesM; m += 2) {
            uint32_t rdY[4];  // operands B of two tiles of tokens
            ptx::ldmatrix_m8n8_x4(rdY, sdY.address(m * kMmaN, n));
#pragma unroll
            for (int k = 0; k < kTilesK; ++k) {
                mma_m16n8k16<kDataType>(rX[k][m], rW[k], rdY[0], rdY[1]);
                mma_m16n8k16<kDataType>(rX[k][m + 1], rW[k], rdY[2], rdY[3]);
            }
        }
    }
}

// Multiplies a warp's sums by `factor`, and writes them to the warp's columns of the tile. The upper and the lower half
// of an MMA tile's rows hold adjacent columns, because ldmatrix.trans loads columns in pairs.
template <typename Config>
FASTATTN_DEVICE void stage_sums(float* sSums, const float (&rX)[Config::kTilesK][Config::kTilesM][4], float factor,
                                int warp_k, int lane) {
#pragma unroll
    for (int k = 0; k < Config::kTilesK; ++k) {
#pragma unroll
        for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = warp_k + k * kMmaM + 2 * accumulator_row(lane);
                const int token = m * kMmaN + accumulator_column(lane) + e;
                const uint64_t left = __float_as_uint(rX[k][m][e] * factor);
                const uint64_t right = __float_as_uint(rX[k][m][e + 2] * factor);
                float* pair = sSums + token * SumsLayout<Config::kBlockK>::kRowElements + column;
                *reinterpret_cast<uint64_t*>(pair) = right << 32 | left;  // one store; nvcc may make two of a float2
            }
        }
    }
}

template <int kBlockM, DataType kDataType>
__global__ void __launch_bounds__(Int8GradInputConfigSm80<kBlockM>::kNumThreads, kCtasPerSm)
    int8_matmul_grad_input_sm80(const __grid_constant__ Int8MatmulParams params) {
    using Config = Int8GradInputConfigSm80<kBlockM>;
    constexpr int kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kNumStages = Config::kNumStages;
    constexpr int kTilesK = Config::kTilesK, kTilesM = Config::kTilesM, kNumThreads = Config::kNumThreads;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<Int8GradInputStorageSm80<Config>*>(shared_bytes);
    static_assert(has_room_for(kCtasPerSm, sizeof(shared)));

    const Int8WeightView& weight = params.weight;
    const int32_t M = params.input.rows, K = weight.columns, N = weight.rows;
    const int warp_k = threadIdx.x / kWarpSize * Config::kWarpK, lane = threadIdx.x % kWarpSize;
    const int warp_group = warp_k / Config::kSmallestGroup >> weight.group_shift;  // the warp's group among the tile's
    const MatmulEpilogue rounding = rounding_only(params.epilogue);
    const MatmulSchedule& schedule = rounding.schedule;
    MatmulWorkTile work = first_work_tile(schedule, blockIdx.x);
    do {  // a tile, or a split of it
        const TilePosition position = tile_position(schedule, work.tile);
        const int32_t first_m = position.m_tile * kBlockM, first_column = position.n_tile * kBlockK;
        WarpFactors<kDataType> factors;
        float rX[kTilesK][kTilesM][4] = {};  // [32 columns, kBlockM tokens]

        // Producer: every thread copies its chunks of each step, and scales of one n.
        const int64_t first_n = int64_t{work.begin_step} * kBlockN;
        TileStream<SwizzledLayout, kBlockN, kNumThreads> load_w(
            weight.data + first_n * weight.row_stride + first_column, weight.row_stride, threadIdx.x);
        TileStream<SwizzledLayout, kBlockM, kNumThreads> load_dy(
            params.input.data + first_m * params.input.row_stride + first_n, params.input.row_stride * 2, threadIdx.x);
        const int scale_n = threadIdx.x % kBlockN;
        const int32_t first_group = first_column / Config::kSmallestGroup >> weight.group_shift;
        const auto load = [&](int32_t step, int stage_idx) {
            auto& stage = shared.stages[stage_idx];
            const int32_t left = N - step * kBlockN;
            load_w.load(shared_address(stage.sW), left, K - first_column, kBlockN * weight.row_stride);
            load_dy.load(shared_address(stage.sdY), M - first_m, left * 2, kBlockN * 2);
            const float* gScale =
                weight.scale + (int64_t{step} * kBlockN + scale_n) * weight.scale_row_stride + first_group;
            const int last_group = (Config::kMostGroups - 1) >> weight.group_shift;
            for (int group = threadIdx.x / kBlockN; group <= last_group; group += kNumThreads / kBlockN) {
                const bool exists = scale_n < left && first_group + group < weight.groups;
                ptx::cp_async_ca_4(shared_address(&stage.sScale[group][scale_n]), gScale + group,
                                   exists ? sizeof(float) : 0);
            }
        };

        TokenSums<kDataType, Config> token_sums(params.token_sums, position, work.begin_step, schedule.n_tiles);
        start_pipeline<kNumStages>(work.begin_step, work.end_step, load);
        TileEpilogue<kDataType, kBlockM, kBlockK, kNumThreads> epilogue(rounding);
        epilogue.open(work);
        token_sums.open(params.epilogue.launch_id);
        const auto run_steps = [&](auto&& sum_tokens) {
            run_pipeline<kNumStages>(work.begin_step, work.end_step, load, [&](int32_t step, int stage_idx) {
                const auto& stage = shared.stages[stage_idx];
                multiply_stage<kDataType, Config>(rX, factors, stage, warp_k, warp_group, lane);
                sum_tokens(step, stage.sdY);
            });
        };
        if (token_sums.are_wanted()) {
            run_steps([&](int32_t step, const uint16_t* sdY) { token_sums.sum(step, sdY); });
        } else {
            run_steps([](int32_t, const uint16_t*) {});
        }

        // Epilogue: the sums pass through shared memory, so that rows of the result are written by neighbouring
        // threads.
        const float factor = factors.divisor() * Int8Decoding<kDataType>::kFactor;
        __syncthreads();  // waits until every warp has read the last stages
        stage_sums<Config>(shared.sums, rX, factor, warp_k, lane);
        const bool is_complete = epilogue.finish(shared.sums, work);
        if (is_complete) token_sums.finish_tile(schedule.m_tiles);
    } while (next_work_tile(schedule, work));
}

template <int kBlockM, DataType kDataType>
void launch_int8_matmul_grad_input_sm80(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Config = Int8GradInputConfigSm80<kBlockM>;
    const Launch launch{num_ctas(params.epilogue.schedule), Config::kNumThreads,
                        sizeof(Int8GradInputStorageSm80<Config>)};
    kernel.launch(int8_matmul_grad_input_sm80<kBlockM, kDataType>, launch, params, stream);
}

}  // namespace fastattn
