// Attention forward, FlashAttention-2 (Dao 2023, algorithm 1): O = softmax(scale · Q·Kᵀ + mask) · V, and the lse.
//
// One CTA computes kBlockM query rows of one head; each of its warps owns 32 of them from start to end, and all lanes
// also copy. Keys pass in tiles of kBlockN from the last that is visible to the first, so that the masked tiles (the
// end of the sequence, the diagonal) come first and have a loop of their own. K and V have one buffer each: while one
// is computed with, the other is on its way.
//
//   cp.async      K2 |   V2   |         K1         |   V1   |         K0         |   V0   |
//   tensor cores     | Q·K2ᵀ  | softmax     P·V2   | Q·K1ᵀ  | softmax     P·V1   | Q·K0ᵀ  | softmax     P·V0
//
// S, P and O stay in registers (PTX ISA, mma.m16n8k16), and Q where they last; else it is reloaded for each tile.
// Preconditions: those of HeadsView, head dims multiples of 8 and at most kHeadDim. Any lengths, any finite scale.
#pragma once

#include <string>
#include <type_traits>

#include "attention/forward.h"
#include "attention/tile_order.h"
#include "attention/tiles_sm80.h"
#include "device/fragment.cuh"
#include "device/mask.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"
#include "device/warp_gemm.cuh"
#include "host/launch.h"

namespace fastattn {

template <int kHeadDim_>
struct ForwardConfigSm80 : ForwardTileSm80<kHeadDim_> {
    using Tile = ForwardTileSm80<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kWarpM = Tile::kBlockM / Tile::kNumWarps;
    static constexpr int kTilesM = kWarpM / kMmaM;
    static constexpr int kTilesN = Tile::kBlockN / kMmaN;
    static constexpr int kTilesD = kHeadDim / kMmaN;
    static constexpr int kAccumulators = 4 * kTilesM * (kTilesN + kTilesD);  // registers of S and O
    static_assert(kWarpM % kMmaM == 0, "a warp owns whole MMA tiles of rows");
    static_assert(Tile::kBlockN % kMmaK == 0, "P·V takes 16 keys at a time");
    static_assert(kHeadDim % kMmaK == 0, "Q·Kᵀ takes 16 dims at a time");
};

template <typename Config>
struct alignas(128) ForwardStorageSm80 {
    uint16_t sQ[Config::kBlockM * Config::kHeadDim];  // swizzled; holds the output at the end
    uint16_t sK[Config::kBlockN * Config::kHeadDim];  // swizzled
    uint16_t sV[Config::kBlockN * Config::kHeadDim];  // swizzled
    static_assert((Config::kBlockM + 2 * Config::kBlockN) * Config::kHeadDim * 2 <= 99 << 10, "sm_86, sm_89, sm_120");
};

template <int kHeadDim, DataType kDataType, bool kCausal>
__global__ void __launch_bounds__(ForwardConfigSm80<kHeadDim>::kNumThreads, ForwardConfigSm80<kHeadDim>::kMinCtasPerSm)
    attention_forward_sm80(const __grid_constant__ AttentionForwardParams params) {
    using Config = ForwardConfigSm80<kHeadDim>;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarpM = Config::kWarpM;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN, kTilesD = Config::kTilesD;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardStorageSm80<Config>*>(shared_bytes);

    // Prologue: which query rows, and how many keys they see.
    const int warp = warp_in_cta(), lane = threadIdx.x % kWarpSize;
    const int32_t num_rows = params.query.rows, num_keys = params.key.rows;
    const auto tile_of = [&](uint32_t cta) { return query_tile(cta, params, ceil_div(num_rows, kBlockM)); };
    const QueryTile tile = tile_of(blockIdx.x);
    const int32_t kv_head = tile.head / (params.query.heads / params.key.heads);
    const int32_t first_row = tile.idx * kBlockM;
    const int32_t warp_row = first_row + warp * kWarpM;
    const auto keys_seen_by = [&](int32_t row) {
        return kCausal ? max(0, min(num_keys, row + params.causal_offset + 1)) : num_keys;
    };
    const int32_t num_key_tiles = ceil_div(keys_seen_by(min(first_row + kBlockM, num_rows) - 1), kBlockN);
    const int32_t num_full_tiles = keys_seen_by(first_row) / kBlockN;  // all rows see all of their keys
    int32_t num_seen[kTilesM][2];                                      // keys that row [m][half] of this lane sees
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) { num_seen[m][half] = keys_seen_by(warp_row + row); });

    // Scores are multiplied by |scale|, so that they grow with Q·Kᵀ, whose maximum softmax takes; Q gets the sign, or
    // 0.
    const float sign = params.scale > 0 ? 1.0f : params.scale < 0 ? -1.0f : params.scale;
    constexpr bool kSumsInTime = Config::kAccumulators > 160;
    OnlineSoftmax<kTilesM, /*kInNats=*/false, /*kFewKeys=*/false, kSumsInTime> softmax(
        sign == 0 ? 1.0f : fabsf(params.scale) * kLog2E);
    float rO[kTilesM][kTilesD][4] = {};  // [kWarpM, kHeadDim]

    // Producer: every thread copies its chunks of each tile. Tiles of keys go from the last to the first.
    int32_t key_tile = num_key_tiles - 1;
    const uint16_t* gQ = row_pointer(params.query, tile.batch, tile.head, first_row);
    const uint16_t* gK = row_pointer(params.key, tile.batch, kv_head, key_tile * kBlockN);
    const uint16_t* gV = row_pointer(params.value, tile.batch, kv_head, key_tile * kBlockN);
    TileLoader<kBlockM, kHeadDim, Config::kNumThreads> load_q(shared.sQ, gQ, params.query.row_stride, threadIdx.x,
                                                              params.query.head_dim);
    TileLoader<kBlockN, kHeadDim, Config::kNumThreads> load_k(shared.sK, gK, params.key.row_stride, threadIdx.x,
                                                              params.key.head_dim);
    TileLoader<kBlockN, kHeadDim, Config::kNumThreads> load_v(shared.sV, gV, params.value.row_stride, threadIdx.x,
                                                              params.value.head_dim);

    const SwizzledBlocks<kHeadDim> sQ(shared.sQ + warp * kWarpM * kHeadDim, ldmatrix_lane(lane));  // [kWarpM, kHeadDim]
    const SwizzledBlocks<kHeadDim> sK(shared.sK, ldmatrix_lane_b(lane));  // [kBlockN, kHeadDim]
    const SwizzledBlocks<kHeadDim> sV(shared.sV, ldmatrix_lane(lane));    // [kBlockN, kHeadDim]
    uint32_t rQ[kTilesM][kHeadDim / kMmaK][4];  // [kWarpM, kHeadDim], where it stays in registers

    // One tile of keys. Where it is masked, it may reach beyond the last key, and rows may differ in what they see.
    const auto step = [&](int32_t first_key, auto masked) {
        constexpr bool kMasked = masked.value;
        float rS[kTilesM][kTilesN][4];  // [kWarpM, kBlockN]: scores, then probabilities

        ptx::cp_async_wait_group<0>();  // K, and at first Q
        __syncthreads();                // K is there for all; all are done with the V before: it may be overwritten
        load_v.template load<kMasked>(num_keys - first_key);
        ptx::cp_async_commit_group();
        if constexpr (Config::kQueryInRegisters) {
            gemm_qk<kDataType>(rS, rQ, sK);
        } else {
            gemm_qk<kDataType>(rS, sQ, sK);
        }

        ptx::cp_async_wait_group<0>();  // V
        bool some_nonfinite = false;
        if constexpr (kMasked) {
            some_nonfinite = __syncthreads_or(has_nonfinite<kDataType>(load_v));
        } else {
            __syncthreads();
        }  // V is there for all; all are done with K: it may be overwritten
        if (first_key > 0) load_k.template load<false>(kBlockN);
        ptx::cp_async_commit_group();

        if constexpr (kMasked) mask_columns(rS, num_seen, first_key, lane);
        softmax.template update<kMasked>(rS, rO);
        if (some_nonfinite) {
            const auto sees = [&](int m, int half, int n) { return n < num_seen[m][half] - first_key; };
            separate_nonfinite<kDataType>(rO, shared.sV, load_v, sees, lane);
        }
        gemm_pv<kDataType>(rO, rS, sV);
    };

    if (num_key_tiles > 0) {
        load_q.template load<true>(num_rows - first_row);
        load_k.template load<true>(num_keys - key_tile * kBlockN);
        ptx::cp_async_commit_group();
        if (sign != 1.0f) {
            ptx::cp_async_wait_group<0>();  // Q: a thread may change what it has copied itself
            load_q.for_own_pairs([&](uint32_t& pair) { pair = multiply<kDataType>(pair, sign); });
        }
        if constexpr (Config::kQueryInRegisters) {
            ptx::cp_async_wait_group<0>();  // Q
            __syncthreads();                // it is there for all
            load_operands_a(rQ, sQ);
        }
    }
    for (; key_tile >= num_full_tiles; --key_tile) step(key_tile * kBlockN, std::true_type{});
    for (; key_tile >= 0; --key_tile) step(key_tile * kBlockN, std::false_type{});

    // Epilogue: a warp stages its rows of the output where its rows of Q were.
    softmax.finish(rO);
    uint16_t* sO = shared.sQ + warp * kWarpM * kHeadDim;
    stage_rows<kDataType>(sO, rO, lane);
    __syncwarp();                                                 // the rows are complete
    const QueryTile out_tile = tile_of(ptx::opaque(blockIdx.x));  // once more: the loops have no registers for it
    const int32_t out_row = out_tile.idx * kBlockM + warp * kWarpM;
    uint16_t* gO = row_pointer(params.out, out_tile.batch, out_tile.head, out_row);
    store_rows<kWarpM, kHeadDim>(gO, params.out.row_stride, num_rows - out_row, sO, lane, params.out.head_dim);
    float* gLse = row_pointer(params.lse, out_tile.batch, out_tile.head);
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
        const bool one_of_four = lane % kLanesPerRow == 0;  // the lanes of a row hold the same
        if (one_of_four && out_row + row < num_rows) gLse[out_row + row] = softmax.row_lse[m][half];
    });
}

template <int kHeadDim, DataType kDataType, bool kCausal>
void launch_attention_forward_sm80(LaunchedKernel& kernel, const AttentionForwardParams& params, Stream stream) {
    using Config = ForwardConfigSm80<kHeadDim>;
    const int64_t num_tiles = ceil_div(params.query.rows, Config::kBlockM);
    const int64_t num_ctas = num_tiles * params.query.heads * params.query.batch;
    const Launch launch{num_ctas, Config::kNumThreads, sizeof(ForwardStorageSm80<Config>)};
    kernel.launch(attention_forward_sm80<kHeadDim, kDataType, kCausal>, launch, params, stream);
}

}  // namespace fastattn
