// Merges the parts of a tile whose keys several CTAs have shared, in the launch that made them:
//
//   lse = log(exp(sink) + sum over parts of exp(lse_part))     out = sum over parts of exp(lse_part - lse) out_part
//
// Of kMergedParts CTAs side by side, the last to come makes one part of theirs; of those, the last to come merges as
// many again, until one is left: the tile's result. A second kernel would cost its launch even where a batch fills the
// GPU and hardly a tile is shared; one CTA alone would have to read 2 MB where one sequence fills an H200 (264 parts of
// 16 rows by 512 bytes). The tree has then two levels of 128 KB at most, each a few loads deep. Parts are added in the
// order of their keys, whoever comes last.
#pragma once

#include <cstdint>

#include "decode/finish_row.cuh"
#include "decode/packed_rows.cuh"
#include "decode/split_plan.h"
#include "device/arrivals.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// Four columns of a row: sums relative to `max` into the result of the tile, with its sink, or into slot `slot` of the
// partial results.
template <int kBlockM, DataType kDataType>
__device__ __forceinline__ void store_row(const DecodeParams& params, int32_t batch, int32_t kv_head, int32_t first_row,
                                          int row, int column, float max, float sum, float4 values, bool is_result,
                                          int64_t slot) {
    const QueryRow own(params, kv_head, first_row + row);
    const bool has_sink = is_result && params.scores.sinks != nullptr;
    const RowResult result = finish_row(max, sum, has_sink ? params.scores.sinks[own.head] : -kInfinity);
    const int64_t partial_row = slot * kBlockM + row;
    const int32_t value_dim = params.v_cache.head_dim;
    if (column == 0) {
        float* gLse =
            is_result ? row_pointer(params.lse, batch, own.head) + own.query : params.partial_lse + partial_row;
        *gLse = result.lse;
    }
    if (column >= value_dim) return;
    if (is_result) {
        store_rounded<kDataType>(row_pointer(params.out, batch, own.head, own.query) + column, values, result.factor);
    } else {
        *reinterpret_cast<float4*>(params.partial_out + partial_row * value_dim + column) =
            scaled(values, result.factor);
    }
}

template <int kBlockM>
struct MergeStorage {
    float lse[kMergedParts][kBlockM];
    int64_t slot[kMergedParts];
};

// The CTA has left its part of a tile, number `part` of `parts`. All threads come here.
template <typename Config, DataType kDataType>
__device__ __forceinline__ void merge_parts(const DecodeParams& params, MergeStorage<Config::kBlockM>& shared,
                                            const TileParts& parts, int32_t part, int32_t batch, int32_t kv_head,
                                            int32_t first_row) {
    constexpr int kBlockM = Config::kBlockM, kQuads = Config::kHeadDim / 4;
    const int num_rows = min(params.sequence.num_queries * params.group - first_row, kBlockM);
    const int32_t value_dim = params.v_cache.head_dim;
    int32_t num_left = parts.count, stride = 1;  // parts of this level, one in `stride` of the first
    for (int level = 0;; ++level) {
        const int32_t first = part / kMergedParts * kMergedParts, count = min(kMergedParts, num_left - first);
        const bool is_result = num_left <= kMergedParts;
        __syncthreads();  // all of this part is there
        // Where several come, there are parts between the first two of them: the one `level` after the first lends its
        // counter to this level alone.
        const bool is_last =
            threadIdx.x == 0 &&
            (count == 1 || arrives_last(params.arrivals + parts.slot(first * stride + level), params.token, count));
        if (!__syncthreads_or(is_last)) return;
        for (int i = threadIdx.x; i < count * kBlockM; i += Config::kNumThreads) {
            const int64_t slot = parts.slot((first + i / kBlockM) * stride);
            if (i % kBlockM < num_rows) {
                shared.lse[i / kBlockM][i % kBlockM] = __ldcg(params.partial_lse + slot * kBlockM + i % kBlockM);
            }
            if (i % kBlockM == 0) shared.slot[i / kBlockM] = slot;
        }
        __syncthreads();  // what is known of the parts is there, and the first part's may be overwritten
#pragma unroll 1
        for (int item = threadIdx.x; item < num_rows * kQuads; item += Config::kNumThreads) {
            const int row = item / kQuads, column = item % kQuads * 4;
            float max = -kInfinity, weights = 0.0f;
            for (int i = 0; i < count; ++i) max = fmaxf(max, shared.lse[i][row]);
            float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
            for (int i = 0; i < count; ++i) {
                const float lse = shared.lse[i][row], weight = weight_of(lse, max);
                weights += weight;
                if (column >= value_dim || lse == -kInfinity) continue;
                const int64_t element = (shared.slot[i] * kBlockM + row) * value_dim + column;
                add_weighted(sum, weight, __ldcg(reinterpret_cast<const float4*>(params.partial_out + element)));
            }
            store_row<kBlockM, kDataType>(params, batch, kv_head, first_row, row, column, max, weights, sum, is_result,
                                          shared.slot[0]);
        }
        if (is_result) return;
        part /= kMergedParts;
        num_left = ceil_div(num_left, kMergedParts);
        stride *= kMergedParts;
    }
}

}  // namespace fastattn
