// Matmul with int8 weights and int8 activations: Y[M, N] = act(Xq · Wᵀ + bias) + residual, where Xq is X[M, K] rounded
// to int8 with a scale per token, and W = scale * int8[N, K], row-major.
//
// As in gemm_sm80.cuh the tile is computed transposed, W · Xqᵀ. One CTA computes kBlockN columns and kBlockM rows of
// the result over its split of K, kBlockK in a step, and the last CTA of a tile adds up the partials. Unlike there,
// both operands go from shared memory to the tensor cores without conversion: a row of ldmatrix's matrices is 16 int8
// numbers.
//
//   cp.async      W of steps 0, 1, 2       | X of 0, 1, 2 |   3    |   4    |
//   all threads   quantise | wait for X                   | step 0 | step 1 |
//
// The tokens are quantised in the same launch, while the first weights are in flight. If there are few tokens, each CTA
// quantises them for itself, and does so in each step instead of copying (tokens_of_cta.cuh). More tokens are quantised
// once for all CTAs (quantize_tokens.cuh).
//
// Sums are int32, which is exact up to kMostInt8SumK of K. With scales per group along K, each int32 sum of 32 or 64 k
// starts not from 0 but from the bits of the float 1.5 * 2^23, whose unit in the last place is 1. The bits of the
// finished sum are then the float 1.5 * 2^23 + sum. One FADD subtracts the start, so that no conversion to fp32 is
// needed.
//
// Preconditions: those of Int8WeightView and MatrixView; N a multiple of 8; K a multiple of 16 and at most
// kMostInt8SumK. No SwiGLU, which would need the gates and ups of the same columns in one tile.
#pragma once

#include <type_traits>

#include "device/fragment.cuh"
#include "device/pipeline.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/opaque.cuh"
#include "device/shared_memory.h"
#include "device/stream_copy.cuh"
#include "device/swizzle.cuh"
#include "host/host_device.h"
#include "host/launch.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/quantize_tokens.cuh"
#include "int8_matmul/tiles_sm80.h"
#include "int8_matmul/tokens_of_cta.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

inline constexpr int kS8MmaK = 32;  // no group of scales is smaller

template <int kBlockM_>
struct Int8MatmulS8ConfigSm80 : Int8MatmulS8TileSm80<kBlockM_> {
    using Tile = Int8MatmulS8TileSm80<kBlockM_>;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kBlocksK = Tile::kBlockK / kS8MmaK;
    static_assert(Tile::kBlockN == kNumThreads && Tile::kBlockM <= kNumThreads, "a thread copies each scale");
};

// [rows, kBlockK] int8. To ldmatrix and the swizzle, a pair of numbers is one element of 16 bits.
template <int kBlockK>
using S8Layout = Swizzle<kBlockK / 2>;

template <typename Config>
struct alignas(128) Int8MatmulS8StageSm80 {
    uint16_t sW[Config::kBlockN * Config::kBlockK / 2];  // S8Layout
    uint16_t sX[Config::kBlockM * Config::kBlockK / 2];  // S8Layout
    float sScale[Config::kBlocksK][Config::kBlockN];     // scales of the step's groups, if there are groups
};

template <typename Config>
struct alignas(128) Int8MatmulS8StorageSm80 {
    union {
        Int8MatmulS8StageSm80<Config> stages[Config::kNumStages];
        float sums[Config::kBlockM * SumsLayout<Config::kBlockN>::kRowElements];  // after the last step
    };
    float sTokenScale[Config::kBlockM];
    union {
        QuantizeStorage<Config::kNumThreads> quantize;
        TokensOfCtaStorage tokens_of_cta;
    };
};

// A warp's position in the tile. If sums are int32, the warps form the grid that loads the fewest operands. With
// groups, sums are fp32, and each warp has all of M and a fourth of N: with more of N, a warp would need more scales
// and operands of W at once, and registers would spill.
template <typename Config, typename Sum>
struct S8Warp {
    static constexpr int kWarpsN = std::is_same_v<Sum, float> ? Config::kNumWarps : Config::kWarpsN;
    static constexpr int kWarpN = Config::kBlockN / kWarpsN;
    static constexpr int kWarpM = Config::kBlockM / (Config::kNumWarps / kWarpsN);
    static constexpr int kTilesN = kWarpN / kMmaM;  // N is the MMA's M
    static constexpr int kTilesM = kWarpM / kMmaN;  // M is its N
    static_assert(kWarpN % kMmaM == 0 && kTilesM % 2 == 0, "a warp owns whole blocks of ldmatrix");
    using Sums = Sum[kTilesN][kTilesM][4];

    int first_n, first_m, lane;

    FASTATTN_DEVICE S8Warp() : lane(threadIdx.x % kWarpSize) {
        const int warp = threadIdx.x / kWarpSize;
        first_n = warp % kWarpsN * kWarpN;
        first_m = warp / kWarpsN * kWarpM;
    }

    // Return the column of N and the row of M, in the tile, of register e of a fragment.
    FASTATTN_DEVICE int output(int n, int e) const { return first_n + n * kMmaM + accumulator_row(lane) + 8 * (e / 2); }
    FASTATTN_DEVICE int token(int m, int e) const { return first_m + m * kMmaN + accumulator_column(lane) + e % 2; }
};

// The operands of a warp's products over kBlocks times 32 k of a stage, starting with the block-th 32 k.
template <typename Config, typename Warp, int kBlocks>
struct S8Operands {
    using Blocks = SwizzledBlocks<Config::kBlockK / 2>;
    static constexpr int kPairs = kS8MmaK / 2;

    uint32_t rW[kBlocks][Warp::kTilesN][4];
    Blocks sX;
    int block;

    FASTATTN_DEVICE S8Operands(const Blocks& sW, const Blocks& sX, int block) : sX(sX), block(block) {
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
            for (int n = 0; n < Warp::kTilesN; ++n) {
                ptx::ldmatrix_m8n8_x4(rW[k][n], sW.address(n * kMmaM, (block + k) * kPairs));
            }
        }
    }

    // Calls function(n, m, multiply) for the warp's tiles; multiply(d, c) computes d = c + the products. kInPairs: a
    // barrier makes nvcc load and multiply two m at a time. Without it, nvcc loads many at once and may run out of
    // registers.
    template <bool kInPairs, typename Function>
    FASTATTN_DEVICE void for_each_tile(Function&& function) const {
#pragma unroll
        for (int m = 0; m < Warp::kTilesM; m += 2) {
            if constexpr (kInPairs) __syncwarp();
            uint32_t rX[kBlocks][4];  // tokens of two tiles
#pragma unroll
            for (int k = 0; k < kBlocks; ++k) ptx::ldmatrix_m8n8_x4(rX[k], sX.address(m * kMmaN, (block + k) * kPairs));
#pragma unroll
            for (int n = 0; n < Warp::kTilesN; ++n) {
#pragma unroll
                for (int second = 0; second < 2; ++second) {
                    function(n, m + second, [&](int32_t (&d)[4], const int32_t (&c)[4]) {
                        ptx::mma_m16n8k32_s32_s8(d, rW[0][n], rX[0][2 * second], rX[0][2 * second + 1], c);
#pragma unroll
                        for (int k = 1; k < kBlocks; ++k) {
                            ptx::mma_m16n8k32_s32_s8(d, rW[k][n], rX[k][2 * second], rX[k][2 * second + 1], d);
                        }
                    });
                }
            }
        }
    }
};

// Calls function(operands) for one stage, kBlocks of 32 k at a time.
template <int kBlocks, typename Config, typename Warp, typename Function>
FASTATTN_DEVICE void for_operands(const Int8MatmulS8StageSm80<Config>& stage, const Warp& warp, Function&& function) {
    using Blocks = SwizzledBlocks<Config::kBlockK / 2>;
    const Blocks sW = Blocks(stage.sW, ldmatrix_lane(warp.lane)).at_row(warp.first_n);
    const Blocks sX = Blocks(stage.sX, ldmatrix_lane_b(warp.lane)).at_row(warp.first_m);
#pragma unroll
    for (int block = 0; block < Config::kBlocksK; block += kBlocks) {
        function(S8Operands<Config, Warp, kBlocks>(sW, sX, block));
    }
}

// rY += W · Xqᵀ over one stage.
template <typename Config>
FASTATTN_DEVICE void multiply_stage(typename S8Warp<Config, int32_t>::Sums& rY,
                                    const Int8MatmulS8StageSm80<Config>& stage, const S8Warp<Config, int32_t>& warp) {
    for_operands<1>(stage, warp, [&](const auto& operands) {
        operands.template for_each_tile<false>([&](int n, int m, auto&& multiply) { multiply(rY[n][m], rY[n][m]); });
    });
}

// Does the same with scales per group. The sums of kBlocks times 32 k, which have the same scale, are int32.
template <int kBlocks, typename Config>
FASTATTN_DEVICE void multiply_stage_of_groups(typename S8Warp<Config, float>::Sums& rY,
                                              const Int8MatmulS8StageSm80<Config>& stage,
                                              const S8Warp<Config, float>& warp, int group_shift) {
    constexpr int kTilesN = S8Warp<Config, float>::kTilesN;
    constexpr float kZero = 0x1.8p23f;  // its unit in the last place is 1, up to sums of 2^22
    static_assert(kBlocks * kS8MmaK * 128 * 127 < 1 << 22);
    const int32_t zero = __float_as_int(kZero);
    const int32_t zeros[4] = {zero, zero, zero, zero};
    for_operands<kBlocks>(stage, warp, [&](const auto& operands) {
        float rScale[kTilesN][2];
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                rScale[n][half] = stage.sScale[operands.block >> group_shift][warp.output(n, 2 * half)];
            }
        }
        operands.template for_each_tile<true>([&](int n, int m, auto&& multiply) {
            int32_t sum[4];
            multiply(sum, zeros);
#pragma unroll
            for (int e = 0; e < 4; ++e) rY[n][m][e] += (__int_as_float(sum[e]) - kZero) * rScale[n][e / 2];
        });
    });
}

// Multiplies a warp's sums by the scales of its weights (gScale; null if they are multiplied already) and of its
// tokens, and stores them in the warp's elements of the tile. Multiplies by the weights' scales first: the tokens'
// scales may be so large that the sums would overflow.
template <typename Config, typename Sum>
FASTATTN_DEVICE void stage_sums(Int8MatmulS8StorageSm80<Config>& shared, const typename S8Warp<Config, Sum>::Sums& rY,
                                const S8Warp<Config, Sum>& warp, const float* gScale, int32_t scale_stride, int32_t N) {
    using Warp = S8Warp<Config, Sum>;
#pragma unroll
    for (int n = 0; n < Warp::kTilesN; ++n) {
        float scale[2] = {1.0f, 1.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int output = warp.output(n, 2 * half);
            if (gScale != nullptr && output < N) scale[half] = gScale[int64_t{output} * scale_stride];
        }
#pragma unroll
        for (int m = 0; m < Warp::kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = warp.token(m, e);
                shared.sums[token * SumsLayout<Config::kBlockN>::kRowElements + warp.output(n, e)] =
                    static_cast<float>(rY[n][m][e]) * scale[e / 2] * shared.sTokenScale[token];
            }
        }
    }
}

template <int kBlockM, DataType kDataType>
__global__ void __launch_bounds__(Int8MatmulS8ConfigSm80<kBlockM>::kNumThreads, kBlockM == 16 ? 2 : 1)
    int8_matmul_s8_sm80(const __grid_constant__ Int8MatmulParams params) {
    using Config = Int8MatmulS8ConfigSm80<kBlockM>;
    constexpr int kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kNumThreads = Config::kNumThreads;
    constexpr int kNumStages = Config::kNumStages;
    static_assert(has_room_for(kCtasPerSm, sizeof(Int8MatmulS8StorageSm80<Config>)));

    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<Int8MatmulS8StorageSm80<Config>*>(shared_bytes);

    ptx::griddepcontrol_wait();  // waits until the previous kernel has written the input
    ptx::griddepcontrol_launch_dependents();
    const Int8WeightView& weight = params.weight;
    const int32_t M = params.input.rows, N = weight.rows, K = weight.columns;
    const auto own_work = [&] {  // recomputed where it is needed, to save registers
        return first_work_tile(params.epilogue.schedule, ptx::opaque(blockIdx.x));
    };
    const MatmulWorkTile work = own_work();
    const TilePosition position = tile_position(params.epilogue.schedule, work.tile);
    const int32_t first_m = position.m_tile * kBlockM, first_n = position.n_tile * kBlockN;
    const int thread = threadIdx.x;
    const bool is_grouped = weight.group_shift != Int8WeightView::kOneGroup;

    // Producer: every thread copies its chunks of each step, and the scales of one output.
    const int64_t first_k = int64_t{work.begin_step} * kBlockK;
    TileStream<S8Layout<kBlockK>, kBlockN, kNumThreads> stream_w(weight.data + first_n * weight.row_stride + first_k,
                                                                 weight.row_stride, thread);
    TileStream<S8Layout<kBlockK>, kBlockM, kNumThreads> stream_x(params.quantized.data + int64_t{first_m} * K + first_k,
                                                                 K, thread);
    const bool has_output = first_n + thread < N;
    const float* gScale = weight.scale + int64_t{first_n + thread} * weight.groups;
    const auto load_w = [&](int32_t step, int stage_idx) {
        auto& stage = shared.stages[stage_idx];
        stream_w.load(shared_address(stage.sW), N - first_n, K - step * kBlockK, kBlockK);
        if (!is_grouped) return;
        const int32_t first_group = step * Config::kBlocksK >> weight.group_shift;
        for (int group = 0; group <= (Config::kBlocksK - 1) >> weight.group_shift; ++group) {
            const bool exists = has_output && first_group + group < weight.groups;
            ptx::cp_async_ca_4(shared_address(&stage.sScale[group][thread]), gScale + first_group + group,
                               exists ? sizeof(float) : 0);
        }
    };
    using OwnTokens = TokensOfCta<kDataType, S8Layout<kBlockK>, kBlockM, kBlockK, kNumThreads>;
    OwnTokens own_tokens;  // used only with the smallest tile
    const bool has_own_tokens = OwnTokens::kMayBe && params.quantized.data == nullptr;
    const auto load_x = [&](int32_t step, int stage_idx) {
        auto& sX = shared.stages[stage_idx].sX;
        if (has_own_tokens) return own_tokens.store(reinterpret_cast<char*>(sX));
        stream_x.load(shared_address(sX), M - first_m, K - step * kBlockK, kBlockK);
    };
    const auto load = [&](int32_t step, int stage_idx) {
        load_w(step, stage_idx);
        load_x(step, stage_idx);
    };

    // Prologue: the first weights are on their way while the tokens are quantised.
    const int32_t end_of_first = std::min(work.end_step, work.begin_step + kNumStages - 1);
    for (int32_t step = work.begin_step; step < end_of_first; ++step) load_w(step, step % kNumStages);
    TileEpilogue<kDataType, kBlockM, kBlockN, kNumThreads> epilogue(params.epilogue);
    epilogue.open(work);
    if (has_own_tokens) {
        own_tokens.start(params.input, work.begin_step, shared.tokens_of_cta, shared.sTokenScale);
        for (auto& stage : shared.stages) own_tokens.clear(reinterpret_cast<char*>(stage.sX));
    } else {
        quantize_tokens<kDataType, kBlockM, kNumThreads>(params.input, params.quantized, shared.quantize);
        wait_for_tokens<kBlockM, kNumThreads>(params.quantized, M, position.m_tile);
        if (thread < std::min(kBlockM, M - first_m)) {
            shared.sTokenScale[thread] = __ldcg(params.quantized.scale + first_m + thread);
        } else if (thread < kBlockM) {
            shared.sTokenScale[thread] = 0.0f;
        }
        if (thread == 0) leave_queue<kBlockM, kNumThreads>(params.quantized, M);
    }
    start_pipeline<kNumStages>(work.begin_step, work.end_step, load_x);

    const auto run_steps = [&](auto zero, const float* gOutputScale, auto&& multiply) {
        const S8Warp<Config, decltype(zero)> warp;
        typename S8Warp<Config, decltype(zero)>::Sums rY = {};
        run_pipeline<kNumStages>(work.begin_step, work.end_step, load,
                                 [&](int32_t, int stage_idx) { multiply(rY, shared.stages[stage_idx], warp); });
        __syncthreads();  // waits until every warp has read the last stages, and for the tokens' scales
        stage_sums<Config>(shared, rY, warp, gOutputScale, weight.scale_row_stride, N - first_n);
    };
    if (!is_grouped) {
        const float* gOutputScale = weight.scale + int64_t{first_n} * weight.scale_row_stride;
        run_steps(int32_t{0}, gOutputScale,
                  [](auto& rY, const auto& stage, const auto& warp) { multiply_stage<Config>(rY, stage, warp); });
    } else if (weight.group_shift == 0) {
        run_steps(0.0f, nullptr, [&](auto& rY, const auto& stage, const auto& warp) {
            multiply_stage_of_groups<1, Config>(rY, stage, warp, weight.group_shift);
        });
    } else {
        run_steps(0.0f, nullptr, [&](auto& rY, const auto& stage, const auto& warp) {
            multiply_stage_of_groups<2, Config>(rY, stage, warp, weight.group_shift);
        });
    }

    // Epilogue: the sums pass through shared memory, so that rows of the result are written by neighbouring threads.
    epilogue.finish(shared.sums, own_work());
}

template <int kBlockM, DataType kDataType>
void launch_int8_matmul_s8_sm80(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Config = Int8MatmulS8ConfigSm80<kBlockM>;
    const Launch launch{num_ctas(params.epilogue.schedule), Config::kNumThreads,
                        sizeof(Int8MatmulS8StorageSm80<Config>), /*cluster_size=*/1, /*is_dependent=*/true};
    kernel.launch(int8_matmul_s8_sm80<kBlockM, kDataType>, launch, params, stream);
}

}  // namespace fastattn
