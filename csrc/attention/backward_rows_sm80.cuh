// Attention backward, the terms of each query row: delta = rowsum(dO * O) - dlse, and shift and log2_sum, which
// normalise P = exp(S - shift) / 2^log2_sum. Also zeroes the sums and counters of the kernels after this one.
//
// Usually shift is lse, and log2_sum is 0. But P = exp(S - lse) loses its normalisation if lse is huge: if every
// visible key has the score finfo.min, finfo.min + log(n) rounds to finfo.min, and P would be 1 instead of 1 / n. Only
// an additive bias makes such scores. In a row with a huge lse, shift is instead the reference of the online softmax
// (device/softmax.cuh), and log2_sum is log2 of the sum of exp(S - shift). Both come from one more pass over the row's
// keys.
//
//   one CTA, 64 rows of one head:   dO, O → delta   (8 lanes for each row, loads of 4 rows in flight; memory-bound)
//   if some lse is huge:            Q·Kᵀ of 64 keys → scores → online softmax   (4 warps of 16 rows, chunked_gemm.cuh)
//
// Preconditions: those of HeadsView, head dims multiples of 8.
#pragma once

#include "attention/backward.h"
#include "attention/query_sums.h"
#include "device/chunked_gemm.cuh"
#include "device/fragment.cuh"
#include "device/key_ranges.cuh"
#include "device/scores.cuh"
#include "device/shared_memory.h"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"
#include "host/launch.h"
#include "host/min_max.h"

namespace fastattn {

template <DataType kDataType>
struct BackwardRowsConfigSm80 {
    // Each warp computes Q·Kᵀ of 16 rows and 64 keys, so that a row's softmax stays in one warp. For 64 dims, a warp
    // executes 32 HMMA, 20 LDSM and 8 LDGSTS. Nothing spills, except one register of the pass over keys on sm_90.
    static constexpr int kTilesM = 1, kTilesN = 8;
    using Gemm = ChunkedGemm<kDataType, /*kWarpsM=*/4, /*kWarpsN=*/1, kTilesM, kTilesN>;
    static constexpr int kBlockM = Gemm::kBlockM, kBlockN = Gemm::kBlockN, kNumThreads = Gemm::kNumThreads;
    static constexpr int kMinCtasPerSm = 3;
    static constexpr int kRowsPerThread = 4;     // of dO and O, whose loads are in flight together
    static constexpr int kMostZeros = 64 * 256;  // floats that a CTA zeroes: the dQ sums of its rows with 256 dims
    static constexpr int kMostLanesPerRow = 8;
    static_assert(kBlockM * kMostLanesPerRow == kRowsPerThread * kNumThreads, "all rows at once");
    static_assert(kBlockM <= kNumThreads, "a thread for each row");
    static_assert(has_room_for(kMinCtasPerSm, sizeof(typename Gemm::Storage) + kBlockM * sizeof(float)));

    // Up to here, rounding lse gives P a relative error of at most 6e-5 (half an ulp of 1024). That is an eighth of the
    // error from rounding P to fp16.
    static constexpr float kLargeLse = 1024.0f;
    FASTATTN_DEVICE static bool is_large(float lse) { return fabsf(lse) > kLargeLse && fabsf(lse) < kInfinity; }
};

// Returns the dot product of two chunks of 8 elements.
template <DataType kDataType>
FASTATTN_DEVICE float dot(const uint4& a, const uint4& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = fmaf(element_of<kDataType>(a, i), element_of<kDataType>(b, i), sum);
    }
    return sum;
}

// Computes sSums[row] = rowsum(dO * O) of num_rows rows, which begin at gGrad and gOut.
template <typename Config, DataType kDataType>
FASTATTN_DEVICE void sum_products(float* sSums, const uint16_t* gGrad, int64_t grad_stride, const uint16_t* gOut,
                                  int64_t out_stride, int32_t num_rows, int32_t head_dim) {
    constexpr int kRowsPerThread = Config::kRowsPerThread;
    // A power of two of lanes, at most 8, shares a row. With 8 lanes, a warp reads 128 bytes of each of 4 rows.
    const int num_chunks = head_dim / kChunkElements;
    const int log2_lanes = num_chunks > 4 ? 3 : num_chunks > 2 ? 2 : num_chunks - 1;
    const int lanes = 1 << log2_lanes, lane_of_row = threadIdx.x & (lanes - 1);
    const int first_row = threadIdx.x >> log2_lanes, rows_per_pass = Config::kNumThreads >> log2_lanes;
    float sums[kRowsPerThread] = {};
    for (int chunk = lane_of_row; chunk < num_chunks; chunk += lanes) {
        uint4 grad[kRowsPerThread], out[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int row = first_row + i * rows_per_pass;
            grad[i] = out[i] = uint4{0, 0, 0, 0};
            if (row >= num_rows) continue;
            grad[i] = *reinterpret_cast<const uint4*>(gGrad + row * grad_stride + chunk * kChunkElements);
            out[i] = *reinterpret_cast<const uint4*>(gOut + row * out_stride + chunk * kChunkElements);
        }
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) sums[i] += dot<kDataType>(grad[i], out[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        for (int other = 1; other < lanes; other *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], other);
        const int row = first_row + i * rows_per_pass;
        if (lane_of_row == 0 && row < num_rows) sSums[row] = sums[i];
    }
}

// Runs the online softmax of the forward pass over all keys that the rows see. `softmax` then holds a reference for
// each row, and the sum of the exponentials relative to this reference. rows: the tile's rows, which begin with row
// first_row of the sequence. keys: all keys of the sequence.
template <typename Config, typename RangesOf>
FASTATTN_DEVICE void gather_scores(OnlineSoftmax<Config::kTilesM, /*kInNats=*/true>& softmax,
                                   typename Config::Gemm& gemm, const HeadScores& scores, RangesOf&& ranges_of,
                                   GemmRows rows, GemmRows keys, int32_t head_dim, int32_t first_row) {
    constexpr int kBlockN = Config::kBlockN, kTilesM = Config::kTilesM, kTilesN = Config::kTilesN;
    const int lane = threadIdx.x % kWarpSize;
    const int32_t begin_tile = scores.window.keys_of(first_row).begin / kBlockN;
    const int32_t end_tile = ceil_div(scores.window.keys_of(first_row + rows.num_rows - 1).end, kBlockN);
    const auto operands_of = [&](int32_t key_tile) -> GemmOperands {
        if (key_tile >= end_tile) return {};
        const int32_t key = key_tile * kBlockN;
        return {rows, {keys.data + key * keys.row_stride, keys.row_stride, keys.num_rows - key}, head_dim};
    };
    gemm.start(operands_of(begin_tile));
    for (int32_t key_tile = begin_tile; key_tile < end_tile; ++key_tile) {
        float rS[kTilesM][kTilesN][4];
        uint32_t rB[kTilesM][kTilesN][4];
        const int32_t warp_row = first_row + gemm.warp_row, first_key = key_tile * kBlockN;
        scores.load_bias(rB, warp_row, first_key, lane);
        gemm.multiply(rS, operands_of(key_tile), operands_of(key_tile + 1));
        scores.to_scores_with(rB, rS, warp_row, first_key, lane);
        scores.mask(rS, warp_row, first_key, lane, ranges_of);
        const auto max = maxima_of_lane(rS);
        if (softmax.is_outgrown_by(max)) softmax.follow(max);
        softmax.exponentiate(rS);
    }
}

// Writes the terms of one row for the Hopper kernels: see RowTermsView. Each row is
// written by a thread of its own. row: counted from the sequence's first row.
FASTATTN_DEVICE void write_row_terms(const AttentionBackwardParams& params, int32_t batch, int32_t head,
                                     int32_t first_in_memory, int32_t row, float shift, float delta, float log2_sum) {
    const bool with_options = params.row_terms.with_options;
    const int32_t block_m = params.row_terms.block_m;
    const int32_t tile =
        row / block_m +
        first_query_tile(batch, params.query.rows, params.packed.cu_seqlens_q != nullptr, first_in_memory, block_m);
    const int32_t block_numbers = RowTermsView::numbers_per_row(with_options) * block_m;
    float* terms = params.row_terms.data + (int64_t{tile} * params.query.heads + head) * block_numbers + row % block_m;
    terms[0] = with_options ? shift : shift * kLog2E;
    terms[block_m] = -delta;
    if (with_options) terms[2 * block_m] = log2_sum;
}

// Writes zeros to `memory`. Called by all threads of the grid.
FASTATTN_DEVICE void zero(const WorkspaceMemory& memory) {
    auto* chunks = reinterpret_cast<uint4*>(memory.data);
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < memory.floats / 4;
         i += int64_t{gridDim.x} * blockDim.x) {
        chunks[i] = uint4{0, 0, 0, 0};
    }
}

template <DataType kDataType>
__global__ void __launch_bounds__(BackwardRowsConfigSm80<kDataType>::kNumThreads,
                                  BackwardRowsConfigSm80<kDataType>::kMinCtasPerSm)
    attention_backward_rows_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Config = BackwardRowsConfigSm80<kDataType>;
    constexpr int kBlockM = Config::kBlockM;
    extern __shared__ __align__(128) char shared_bytes[];  // only with an additive bias
    __shared__ float sSums[kBlockM];

    zero(params.to_zero);

    // Prologue: finds the CTA's query rows. Some CTAs have none: they only write zeros.
    const ScoreParams& options = params.scores;
    const int32_t num_tiles = max(ceil_div(params.query.rows, kBlockM), 1);
    const int32_t first_row = blockIdx.x % num_tiles * kBlockM, head_idx = blockIdx.x / num_tiles;
    const int32_t head = head_idx % params.query.heads, batch = head_idx / params.query.heads;
    if (batch >= params.query.batch) return;
    const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
    if (first_row >= rows.length) return;
    const int32_t begin = rows.begin + first_row, num_rows = min(kBlockM, rows.length - first_row);
    const auto number_of = [&](const RowsView& view, int32_t row) -> float& {
        return row_pointer(view, batch, head)[begin + row];
    };

    // Each thread finishes one row when the sums of all rows are complete.
    const int32_t row = threadIdx.x;
    const bool exists = row < num_rows, is_additive = params.log2_sum.data != nullptr;
    const float lse = exists ? number_of(params.lse, row) : 0.0f;
    const float grad_lse = exists && params.grad_lse.data != nullptr ? number_of(params.grad_lse, row) : 0.0f;
    sum_products<Config, kDataType>(sSums, row_pointer(params.grad_out, batch, head, begin), params.grad_out.row_stride,
                                    row_pointer(params.out, batch, head, begin), params.out.row_stride, num_rows,
                                    params.out.head_dim);
    __syncthreads();  // waits until the sums of all rows are in shared memory
    const bool needs_sum = is_additive && Config::is_large(lse);
    const float delta = exists ? sSums[row] - grad_lse : 0.0f;
    // With a shift of +inf, every probability of a row that sees nothing is exp(-inf) = 0.
    const float shift = !exists || lse == -kInfinity ? kInfinity : lse;
    if (exists) {
        number_of(params.delta, row) = delta;
        if (!needs_sum) number_of(params.shift, row) = shift;
        if (is_additive && !needs_sum) number_of(params.log2_sum, row) = 0.0f;
    }
    if (params.row_terms.data != nullptr) {
        static_assert(Config::kNumThreads >= kMostRowsInBlock, "a thread for each row that fills the last block");
        const bool fills_block =
            first_row + kBlockM >= rows.length &&
            first_row + row < ceil_div(rows.length, params.row_terms.block_m) * params.row_terms.block_m;
        if (exists || fills_block)
            write_row_terms(params, batch, head, rows.begin, first_row + row, shift, delta, 0.0f);
    }
    if (!is_additive || !__syncthreads_or(needs_sum)) return;

    // Some row's lse is large: one more pass over the keys, for all rows.
    const int32_t key_head = head / (params.query.heads / params.key.heads);
    const Sequence keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
    const HeadScores scores(options, batch, head, rows.length, keys.length);
    const int lane = threadIdx.x % kWarpSize;
    const bool is_row_leader = lane % kLanesPerRow == 0;  // all four lanes of a row hold the same sums
    typename Config::Gemm gemm(*reinterpret_cast<typename Config::Gemm::Storage*>(shared_bytes), threadIdx.x);
    OnlineSoftmax<Config::kTilesM, /*kInNats=*/true> softmax(kLog2E);
    if (options.sinks != nullptr) softmax.set_sink(options.sinks[head], is_row_leader);
    gather_scores<Config>(
        softmax, gemm, scores, [&] { return RowRanges(options.ranges, batch, head, rows); },
        {row_pointer(params.query, batch, head, begin), params.query.row_stride, num_rows},
        {row_pointer(params.key, batch, key_head, keys.begin), params.key.row_stride, keys.length},
        params.query.head_dim, first_row);
    for_own_rows<Config::kTilesM>(lane, [&](int m, int half, int row_of_warp) {
        const float sum = row_reduce_sum(softmax.row_sum[m][half]);
        const int32_t own_row = gemm.warp_row + row_of_warp;
        if (!is_row_leader || own_row >= num_rows || !Config::is_large(number_of(params.lse, own_row))) return;
        const float shift = softmax.reference[m][half], log2_sum = log2f(sum);
        number_of(params.shift, own_row) = shift;
        number_of(params.log2_sum, own_row) = log2_sum;
        if (params.row_terms.data != nullptr) {
            write_row_terms(params, batch, head, rows.begin, first_row + own_row, shift,
                            number_of(params.delta, own_row), log2_sum);
        }
    });
}

template <DataType kDataType>
void launch_attention_backward_rows_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params, Stream stream) {
    using Config = BackwardRowsConfigSm80<kDataType>;
    const int64_t num_tiles = int64_t{ceil_div(params.query.rows, Config::kBlockM)} * params.query.heads;
    const int64_t ctas_for_zeros = ceil_div(params.to_zero.floats, Config::kMostZeros);
    const bool is_additive = params.log2_sum.data != nullptr;
    const Launch launch{std::max(num_tiles * params.query.batch, ctas_for_zeros), Config::kNumThreads,
                        is_additive ? sizeof(typename Config::Gemm::Storage) : 0};
    kernel.launch(attention_backward_rows_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
