// Merges the parts of rows whose keys several CTAs of split_sm80.cuh have shared:
//
//   lse = log(exp(sink) + sum over parts of exp(lse_part))     out = sum over parts of exp(lse_part - lse) out_part
//
// A CTA merges one row: its warps take parts in turn, its lanes four dims each. Which parts there are follows from the
// plan; a row that one CTA had as a whole is finished already. Parts are added in the order of their keys.
#pragma once

#include <string>

#include "decode/decode.h"
#include "decode/finish_row.cuh"
#include "decode/packed_rows.cuh"
#include "decode/planned_work.cuh"
#include "decode/tiles_sm80.h"
#include "device/tile_copy.cuh"
#include "host/dispatch.h"
#include "host/launch.h"

namespace fastattn {

struct CombineConfigSm80 {
    using Tile = DecodeTileSm80<largest(DecodeHeadDims{})>;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumThreads = kNumWarps * kWarpSize;
    static constexpr int kDimsPerPass = 4 * kWarpSize;
    static constexpr int kPasses = largest(DecodeHeadDims{}) / kDimsPerPass;
};

struct alignas(16) CombineStorageSm80 {
    float4 sums[CombineConfigSm80::kNumWarps][CombineConfigSm80::kPasses][kWarpSize];
    float max[CombineConfigSm80::kNumWarps], weight[CombineConfigSm80::kNumWarps];
};

template <DataType kDataType>
__global__ void __launch_bounds__(CombineConfigSm80::kNumThreads)
    decode_combine_sm80(const __grid_constant__ DecodeParams params) {
    using Config = CombineConfigSm80;
    using Tile = Config::Tile;
    __shared__ CombineStorageSm80 shared;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

    // Which row, and which CTAs have had its tile.
    const int32_t num_queries = params.sequence.num_queries;
    const int32_t query = blockIdx.x % num_queries, head = blockIdx.x / num_queries % params.query.heads;
    const int32_t batch = blockIdx.x / num_queries / params.query.heads;
    const int32_t row = query * params.group + head % params.group;
    const int32_t tile_idx = head / params.group * params.row_tiles + row / Tile::kBlockM;
    const PlannedWork<Tile::kBlockN> work(params, lane);
    const PlannedSequence sequence = work.planned(batch);
    const int64_t first_unit = sequence.first_unit + int64_t{tile_idx} * sequence.units.num_units;
    const auto first_cta = static_cast<int32_t>(first_unit / work.share());
    const auto last_cta = static_cast<int32_t>((first_unit + sequence.units.num_units - 1) / work.share());
    if (first_cta == last_cta) return;
    const auto partial_row = [&](int32_t cta) {
        const int64_t slot = partial_slot(params.plan, cta, cta * work.share() >= first_unit);
        return slot * Tile::kBlockM + row % Tile::kBlockM;
    };

    // The maximum first, so that the sums need no rescaling.
    float max = -kInfinity;
    for (int32_t cta = first_cta + threadIdx.x; cta <= last_cta; cta += Config::kNumThreads) {
        max = fmaxf(max, params.partial_lse[partial_row(cta)]);
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, distance));
    }
    if (lane == 0) shared.max[warp] = max;
    __syncthreads();  // the warps' maxima are there
#pragma unroll
    for (int other = 0; other < Config::kNumWarps; ++other) max = fmaxf(max, shared.max[other]);

    const int32_t value_dim = params.v_cache.head_dim;
    float weights = 0.0f;
    float4 sums[Config::kPasses] = {};
#pragma unroll 4
    for (int32_t cta = first_cta + warp; cta <= last_cta; cta += Config::kNumWarps) {
        const int64_t part = partial_row(cta);
        const float lse = params.partial_lse[part];
        const float weight = weight_of(lse, max);
        weights += weight;
#pragma unroll
        for (int pass = 0; pass < Config::kPasses; ++pass) {
            const int column = pass * Config::kDimsPerPass + 4 * lane;
            if (column >= value_dim || lse == -kInfinity) continue;
            add_weighted(sums[pass], weight,
                         *reinterpret_cast<const float4*>(params.partial_out + part * value_dim + column));
        }
    }

    // The first warp adds up what all have.
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) shared.sums[warp][pass][lane] = sums[pass];
    if (lane == 0) shared.weight[warp] = weights;
    __syncthreads();  // the warps' sums are there
    if (warp != 0) return;
    weights = 0.0f;
#pragma unroll
    for (int other = 0; other < Config::kNumWarps; ++other) weights += shared.weight[other];
    const bool has_sink = params.scores.sinks != nullptr;
    const RowResult result = finish_row(max, weights, has_sink ? params.scores.sinks[head] : -kInfinity);
    if (lane == 0) row_pointer(params.lse, batch, head)[query] = result.lse;
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int other = 0; other < Config::kNumWarps; ++other) add_weighted(sum, 1.0f, shared.sums[other][pass][lane]);
        const int column = pass * Config::kDimsPerPass + 4 * lane;
        if (column >= value_dim) continue;
        store_rounded<kDataType>(row_pointer(params.out, batch, head, query) + column, sum, result.factor);
    }
}

template <DataType kDataType>
void launch_decode_combine_sm80(const DecodeParams& params, Stream stream) {
    static const std::string name = std::string("decode_combine_sm80<") + to_string(kDataType) + ">";
    const int64_t num_rows = int64_t{params.query.batch} * params.query.heads * params.query.rows;
    const Launch launch{name.c_str(), /*compute_capability=*/80, num_rows, CombineConfigSm80::kNumThreads, 0};
    launch_kernel(decode_combine_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
