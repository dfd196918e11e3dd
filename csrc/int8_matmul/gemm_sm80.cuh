// Matmul with int8 weights: Y[M, N] = act(X[M, K] · Wᵀ + bias) + residual, W = scale * int8[N, K], row-major.
//
// The tile is computed transposed, W · Xᵀ: weights are operand A of the MMA. Tokens are then padded to its n = 8, not
// to its m = 16. One CTA computes kBlockN columns and kBlockM rows of Y over its split of K. Each warp owns 32 of the
// columns. It reads their int8 weights from shared memory, converts each weight once to a 16-bit float in registers
// (device/dequantize.cuh), and multiplies the weights by all tokens.
//
// A step takes kBlockK of K. With kNumStages of 4:
//
//   cp.async      W, X of step 0 | 1 | 2 |   3    |   4    |   5    |
//   tensor cores                         | step 0 | step 1 | step 2 | step 3
//
// The weights need no packed copy. A sum over K may take its terms in any order, as long as W and X have the same
// order: in every 32 k, lane t of a quad takes k = 8t … 8t + 7, for two MMAs. They are 8 bytes of a row of W and 16
// bytes of a row of X. Copies take 16 bytes a thread, in whole sectors. Converting a pair of weights costs 0.5 LOP3, 1
// PRMT and 1 HFMA2. Weights stored with a bias of 128 would save the LOP3, but they would need a second copy of all
// weights, or a conversion whenever a state dict is saved or loaded.
//
// Scales per tensor or channel multiply the finished sums. Scales per group along K multiply the sums of 32 k. With
// SwiGLU a tile has 64 gates and the 64 ups of the same columns of Y; the epilogue combines their finished sums. If
// there are too few tiles to fill the GPU, several CTAs split a tile's K (stream_k.h), and the last of them to finish
// adds up the partials. So the steps above are those of one work tile, and a CTA may go on to another work tile.
//
// Preconditions: those of Int8WeightView and MatrixView. N and K may have any value, because copies stop at the last
// byte of a row.
#pragma once

#include <type_traits>

#include "device/dequantize.cuh"
#include "device/fragment.cuh"
#include "device/pipeline.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/opaque.cuh"
#include "device/shared_memory.h"
#include "device/stream_copy.cuh"
#include "device/swizzle.cuh"
#include "host/host_device.h"
#include "host/launch.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/tiles_sm80.h"
#include "scheduler/stream_k.h"

namespace fastattn {

inline constexpr int kDequantK = 32;  // k that a quad reads at once, for two MMAs; no group of scales is smaller

template <int kBlockM_>
struct Int8MatmulConfigSm80 : Int8MatmulTileSm80<kBlockM_> {
    using Tile = Int8MatmulTileSm80<kBlockM_>;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kHalfN = Tile::kBlockN / 2;  // with SwiGLU: the gates of a tile, followed by as many ups
    static constexpr int kWarpN = Tile::kBlockN / Tile::kNumWarps;
    static constexpr int kTilesN = kWarpN / kMmaM;         // N is the MMA's M
    static constexpr int kTilesM = Tile::kBlockM / kMmaN;  // M is its N
    static constexpr int kBlocksK = Tile::kBlockK / kDequantK;
    static_assert(kWarpN % kMmaM == 0 && Tile::kBlockM % kMmaN == 0, "a warp owns whole MMA tiles");
    static_assert(Tile::kBlockN == kNumThreads, "each thread copies the scales of one output");
};

// The layout of weights, [kBlockN, kBlockK] int8, with 16-byte chunks permuted. At once, 16 lanes read 8 bytes each, of
// 4 neighbouring rows. Thanks to the permutation these bytes cover all 32 banks.
template <int kBlockK>
struct WeightLayout {
    static constexpr int kRowBytes = kBlockK;
    static constexpr int kRowsPerLine = 128 / kRowBytes;
    static constexpr int kPeriodRows = 4;
    static_assert(kRowBytes == 64 || kRowBytes == 128, "a row is half of all banks, or all of them");

    FASTATTN_DEVICE static uint32_t offset(int row, int chunk) {
        return row * kRowBytes + (chunk ^ row / kRowsPerLine % (kPeriodRows / kRowsPerLine) * 2) * kChunkBytes;
    }
};

// The layout of tokens, [kBlockM, kBlockK] of 16 bits. In odd rows, the halves of each 128 bytes are exchanged. At
// once, 8 lanes read 16 bytes each: 64 bytes of each of 2 neighbouring rows. Thanks to the exchange these bytes cover
// all banks.
template <int kBlockK>
struct TokenLayout {
    static constexpr int kRowBytes = kBlockK * 2;
    static constexpr int kPeriodRows = 2;
    static_assert(kRowBytes % 128 == 0, "a row must hold whole periods of the pattern");

    FASTATTN_DEVICE static uint32_t offset(int row, int chunk) {
        return row * kRowBytes + (chunk ^ row % kPeriodRows * 4) * kChunkBytes;
    }
};

template <typename Config>
struct alignas(128) Int8MatmulStageSm80 {
    int8_t sW[Config::kBlockN * Config::kBlockK];     // WeightLayout
    uint16_t sX[Config::kBlockM * Config::kBlockK];   // TokenLayout
    float sScale[Config::kBlocksK][Config::kBlockN];  // scales of the step's groups, if there are groups
};

template <typename Config>
struct alignas(128) Int8MatmulStorageSm80 {
    union {
        Int8MatmulStageSm80<Config> stages[Config::kNumStages];
        float sums[Config::kBlockM * SumsLayout<Config::kBlockN>::kRowElements];  // after the last step
    };
    MatmulWorkTile work;  // kept here during the steps, where registers are scarce
};

// rY[kTilesN][kTilesM] += W · Xᵀ over one stage, for the warp whose columns of N start at warp_n.
template <DataType kDataType, bool kGrouped, typename Config>
FASTATTN_DEVICE void multiply_stage(float (&rY)[Config::kTilesN][Config::kTilesM][4],
                                    const Int8MatmulStageSm80<Config>& stage, int warp_n, int group_shift, int lane) {
    constexpr int kBlockK = Config::kBlockK, kTilesN = Config::kTilesN, kTilesM = Config::kTilesM;
    using Weights = WeightLayout<kBlockK>;
    using Tokens = TokenLayout<kBlockK>;
    const int row = accumulator_row(lane), quad_lane = lane % kLanesPerRow;
    // Offsets of the first 32 k. Chunks are permuted by an exclusive or, so a move by 32 k is an exclusive or with the
    // offset.
    const uint32_t w_offset = Weights::offset(warp_n + row, quad_lane / 2) + quad_lane % 2 * 8;
    const uint32_t x_offset = Tokens::offset(row, quad_lane);
    const char* sW = reinterpret_cast<const char*>(stage.sW);
    const char* sX = reinterpret_cast<const char*>(stage.sX);
    constexpr int kBlockUnroll = kTilesM <= 8 ? Config::kBlocksK : 1;  // unrolled, 96 tokens spill 72 bytes
#pragma unroll(kBlockUnroll)
    for (int block = 0; block < Config::kBlocksK; ++block) {
        uint32_t rW[kTilesN][2][4];  // operands A of two MMAs
        float rScale[kTilesN][2];
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int tile_row = n * kMmaM + half * 8;
                const uint64_t eight = *reinterpret_cast<const uint64_t*>(  // one load; nvcc makes two of a uint2
                    sW + (w_offset ^ block * kDequantK) + tile_row * Weights::kRowBytes);
                const uint32_t four[2] = {biased(static_cast<uint32_t>(eight)),
                                          biased(static_cast<uint32_t>(eight >> 32))};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    rW[n][k][half] = decode_pair<kDataType, 0, 1>(four[k]);
                    rW[n][k][half + 2] = decode_pair<kDataType, 2, 3>(four[k]);
                }
                if constexpr (kGrouped) {
                    rScale[n][half] = stage.sScale[block >> group_shift][warp_n + row + tile_row];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            const uint4 rX = *reinterpret_cast<const uint4*>(sX + (x_offset ^ block * kDequantK * 2) +
                                                             m * kMmaN * Tokens::kRowBytes);
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                if constexpr (kGrouped) {
                    float sum[4] = {};
                    mma_m16n8k16<kDataType>(sum, rW[n][0], rX.x, rX.y);
                    mma_m16n8k16<kDataType>(sum, rW[n][1], rX.z, rX.w);
#pragma unroll
                    for (int e = 0; e < 4; ++e) rY[n][m][e] += sum[e] * rScale[n][e / 2];
                } else {
                    mma_m16n8k16<kDataType>(rY[n][m], rW[n][0], rX.x, rX.y);
                    mma_m16n8k16<kDataType>(rY[n][m], rW[n][1], rX.z, rX.w);
                }
            }
        }
    }
}

// Stores a warp's sums in its columns of the tile.
template <DataType kDataType, typename Config>
FASTATTN_DEVICE void stage_sums(float* sSums, const float (&rY)[Config::kTilesN][Config::kTilesM][4], int warp_n,
                                int lane) {
#pragma unroll
    for (int n = 0; n < Config::kTilesN; ++n) {
#pragma unroll
        for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int output = warp_n + n * kMmaM + accumulator_row(lane) + 8 * (e / 2);
                const int token = m * kMmaN + accumulator_column(lane) + e % 2;
                sSums[token * SumsLayout<Config::kBlockN>::kRowElements + output] =
                    rY[n][m][e] * Int8Decoding<kDataType>::kFactor;
            }
        }
    }
}

template <int kBlockM, DataType kDataType>
__global__ void __launch_bounds__(Int8MatmulConfigSm80<kBlockM>::kNumThreads, kCtasPerSm)
    int8_matmul_sm80(const __grid_constant__ Int8MatmulParams params) {
    using Config = Int8MatmulConfigSm80<kBlockM>;
    constexpr int kBlockN = Config::kBlockN, kHalfN = Config::kHalfN, kBlockK = Config::kBlockK;
    constexpr int kTilesN = Config::kTilesN, kTilesM = Config::kTilesM;
    constexpr int kNumStages = Config::kNumStages, kNumThreads = Config::kNumThreads;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<Int8MatmulStorageSm80<Config>*>(shared_bytes);
    static_assert(has_room_for(kCtasPerSm, sizeof(shared)));

    ptx::griddepcontrol_wait();  // waits until the previous kernel has written the input
    ptx::griddepcontrol_launch_dependents();
    const Int8WeightView& weight = params.weight;
    const int32_t M = params.input.rows, N = params.epilogue.out.columns, K = weight.columns;
    const bool is_grouped = weight.group_shift != Int8WeightView::kOneGroup;
    MatmulWorkTile work = first_work_tile(params.epilogue.schedule, blockIdx.x);
    do {  // a tile, or a split of it
        const TilePosition position = tile_position(params.epilogue.schedule, work.tile);
        const int32_t first_m = position.m_tile * kBlockM;
        const int32_t first_n = position.n_tile * params.epilogue.result_columns(kBlockN);
        const int thread = ptx::opaque(threadIdx.x);  // nvcc keeps no values that depend on it across tiles
        const int warp_n = thread / kWarpSize * Config::kWarpN, lane = thread % kWarpSize;
        float rY[kTilesN][kTilesM][4] = {};  // [32 of N, kBlockM]
        if (thread == 0) shared.work = work;

        // Producer: every thread copies its chunks of each step, and the scales of one output.
        const int64_t first_k = int64_t{work.begin_step} * kBlockK;
        TileStream<WeightLayout<kBlockK>, kHalfN, kNumThreads> load_w(
            weight.data + first_n * weight.row_stride + first_k, weight.row_stride, thread);
        TileStream<TokenLayout<kBlockK>, kBlockM, kNumThreads> load_x(
            params.input.data + first_m * params.input.row_stride + first_k, params.input.row_stride * 2, thread);
        const auto load = [&](int32_t step, int stage_idx) {
            auto& stage = shared.stages[stage_idx];
            const int32_t left = K - step * kBlockK;
            const int32_t to_second = params.epilogue.is_gated() ? N : kHalfN;  // rows to the second half or the ups
            const int32_t first_row = ptx::opaque(first_n), second_row = first_row + to_second;
            load_w.load_at_distance(shared_address(stage.sW + kHalfN * kBlockK), weight.rows - second_row, left,
                                    to_second * weight.row_stride);
            load_w.load(shared_address(stage.sW), N - first_row, left, kBlockK);
            load_x.load(shared_address(stage.sX), M - first_m, left * 2, kBlockK * 2);
            if (!is_grouped) return;
            const bool is_second = thread >= kHalfN;
            const int32_t scale_row = (is_second ? second_row : first_row) + thread % kHalfN;
            const bool has_output = scale_row < (is_second ? weight.rows : N);
            const int32_t first_group = step * Config::kBlocksK >> weight.group_shift;
            const float* gScale = weight.scale + int64_t{scale_row} * weight.groups + first_group;
            for (int group = 0; group <= (Config::kBlocksK - 1) >> weight.group_shift; ++group) {
                const bool exists = has_output && first_group + group < weight.groups;
                ptx::cp_async_ca_4(shared_address(&stage.sScale[group][thread]), gScale + group,
                                   exists ? sizeof(float) : 0);
            }
        };

        start_pipeline<kNumStages>(work.begin_step, work.end_step, load);
        TileEpilogue<kDataType, kBlockM, kBlockN, kNumThreads> epilogue(params.epilogue);
        epilogue.open(work);
        const auto run_steps = [&](auto grouped) {
            run_pipeline<kNumStages>(work.begin_step, work.end_step, load, [&](int32_t, int stage_idx) {
                multiply_stage<kDataType, grouped.value, Config>(rY, shared.stages[stage_idx], warp_n,
                                                                 weight.group_shift, lane);
            });
        };
        if (is_grouped) {
            run_steps(std::true_type{});
        } else {
            run_steps(std::false_type{});
        }

        // Epilogue: the sums pass through shared memory, so that rows of the result are written by neighbouring
        // threads.
        __syncthreads();  // waits until every warp has read the last stages
        work = shared.work;
        stage_sums<kDataType, Config>(shared.sums, rY, warp_n, lane);
        epilogue.finish(shared.sums, work);
    } while (next_work_tile(params.epilogue.schedule, work));
}

template <int kBlockM, DataType kDataType>
void launch_int8_matmul_sm80(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Config = Int8MatmulConfigSm80<kBlockM>;
    const Launch launch{num_ctas(params.epilogue.schedule), Config::kNumThreads, sizeof(Int8MatmulStorageSm80<Config>),
                        /*cluster_size=*/1, /*is_dependent=*/true};
    kernel.launch(int8_matmul_sm80<kBlockM, kDataType>, launch, params, stream);
}

}  // namespace fastattn
