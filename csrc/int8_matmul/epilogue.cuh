// Turns the sums of a matmul into its result: scale → bias → activation → residual, and one rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "host/min_max.h"
#include "int8_matmul/int8_matmul.h"
#include "scheduler/arrivals.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

// A CTA's tile of sums [tokens, kColumns] in shared memory. Neither storing accumulators nor loading rows with 16 bytes
// a thread has bank conflicts.
template <int kColumns>
struct SumsLayout {
    static constexpr int kRowElements = kColumns + 4;
    static_assert(kRowElements % 16 == 4, "tokens 0, 2, 4, 6, of the lanes of a quad, must lie 8 banks apart");
};

template <typename Function>
FASTATTN_DEVICE void for_each_value(float (&values)[kEpilogueColumns], Function&& function) {
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) values[e] = function(values[e]);
}

// Applies the activation. NaN stays NaN.
FASTATTN_DEVICE void activate(Activation activation, float (&values)[kEpilogueColumns]) {
    constexpr float kSqrtHalf = 0.707106781186547524f, kSqrt2OverPi = 0.797884560802865356f;
    switch (activation) {
        case Activation::kNone:
            break;
        case Activation::kRelu:
            for_each_value(values, [](float x) { return x < 0.0f ? 0.0f : x; });
            break;
        case Activation::kGelu:
            for_each_value(values, [](float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); });
            break;
        case Activation::kGeluTanh:
            for_each_value(
                values, [](float x) { return 0.5f * x * (1.0f + tanhf((x + 0.044715f * x * x * x) * kSqrt2OverPi)); });
            break;
        case Activation::kSilu:
        case Activation::kSwiglu:  // applied to the gates
            for_each_value(values, [](float x) { return x / (1.0f + expf(-x)); });
            break;
    }
}

// Returns whether a chunk of elements, of which `count` exist, can be read or written by one instruction: all of its
// elements exist, and it is aligned. If the width of a result is not a multiple of 4, few rows are aligned.
FASTATTN_DEVICE bool is_whole_vector(const uint16_t* elements, int count) {
    return count == kEpilogueColumns && reinterpret_cast<uintptr_t>(elements) % sizeof(uint2) == 0;
}

// Adds the first `count` elements to the values.
template <DataType kDataType>
FASTATTN_DEVICE void add_elements(float (&values)[kEpilogueColumns], const uint16_t* elements, int count) {
    if (is_whole_vector(elements, count)) {
        const uint2 bits = *reinterpret_cast<const uint2*>(elements);
        values[0] += unpack<kDataType>(static_cast<uint16_t>(bits.x));
        values[1] += unpack<kDataType>(static_cast<uint16_t>(bits.x >> 16));
        values[2] += unpack<kDataType>(static_cast<uint16_t>(bits.y));
        values[3] += unpack<kDataType>(static_cast<uint16_t>(bits.y >> 16));
        return;
    }
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) {
        if (e < count) values[e] += unpack<kDataType>(elements[e]);
    }
}

template <DataType kDataType>
FASTATTN_DEVICE void store_elements(uint16_t* elements, const float (&values)[kEpilogueColumns], int count) {
    const uint2 bits = {pack<kDataType>(values[0], values[1]), pack<kDataType>(values[2], values[3])};
    if (is_whole_vector(elements, count)) {
        *reinterpret_cast<uint2*>(elements) = bits;
        return;
    }
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) {
        if (e < count) elements[e] = static_cast<uint16_t>((e < 2 ? bits.x : bits.y) >> e % 2 * 16);
    }
}

// A thread's sums for four neighbouring elements of the result. With SwiGLU, `first` holds the elements' gates and `up`
// their ups; otherwise `up` is not used.
struct ChunkSums {
    float4 first, up;
};

// Computes scale * sum + bias for four neighbouring columns of sums, of which `column` is the first. The first `count`
// of them exist.
template <DataType kDataType>
FASTATTN_DEVICE void scale_and_add_bias(const MatmulEpilogue& epilogue, float (&values)[kEpilogueColumns],
                                        const float4& sums, int32_t column, int count) {
    values[0] = sums.x, values[1] = sums.y, values[2] = sums.z, values[3] = sums.w;
    if (epilogue.scale != nullptr) {
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) {
            if (e < count) values[e] *= epilogue.scale[(column + e) * epilogue.scale_stride];
        }
    }
    if (epilogue.bias != nullptr) add_elements<kDataType>(values, epilogue.bias + column, count);
}

// Computes and writes four neighbouring elements of the result, or as many of them as exist. `column` is the first
// one's column.
template <DataType kDataType>
FASTATTN_DEVICE void finish(const MatmulEpilogue& epilogue, const ChunkSums& sums, int64_t row, int32_t column) {
    const int count = min(kEpilogueColumns, epilogue.out.columns - column);
    float values[kEpilogueColumns];
    scale_and_add_bias<kDataType>(epilogue, values, sums.first, column, count);
    activate(epilogue.activation, values);
    if (epilogue.is_gated()) {
        float up[kEpilogueColumns];
        scale_and_add_bias<kDataType>(epilogue, up, sums.up, column + epilogue.out.columns, count);
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) values[e] *= up[e];
    }
    if (epilogue.residual.data != nullptr) {
        add_elements<kDataType>(values, epilogue.residual.data + row * epilogue.residual.row_stride + column, count);
    }
    store_elements<kDataType>(epilogue.out.data + row * epilogue.out.row_stride + column, values, count);
}

// Calls function(sums, row, column) for each chunk of a tile that this thread finishes. Skips chunks outside of the
// result. With SwiGLU, the left half of the tile's columns are gates, and the right half the ups of the same elements.
template <int kRows, int kColumns, int kThreads, typename Function>
FASTATTN_DEVICE void for_own_chunks(const MatmulEpilogue& epilogue, const float* sSums, const TilePosition& position,
                                    Function&& function) {
    constexpr int kMostChunks = kColumns / kEpilogueColumns;
    static_assert(kThreads % kMostChunks == 0, "a pass must take whole rows");
    const int columns = epilogue.result_columns(kColumns), chunks_per_row = columns / kEpilogueColumns;
    const int tile_column = threadIdx.x % chunks_per_row * kEpilogueColumns;
    const int32_t first_row = position.m_tile * kRows, column = position.n_tile * columns + tile_column;
    if (column >= epilogue.out.columns) return;
    const int rows_here = min(kRows, epilogue.out.rows - first_row);
#pragma unroll 1
    for (int row = threadIdx.x / chunks_per_row; row < rows_here; row += kThreads / chunks_per_row) {
        const float* sums = sSums + row * SumsLayout<kColumns>::kRowElements + tile_column;
        ChunkSums chunk{*reinterpret_cast<const float4*>(sums), {}};
        if (epilogue.is_gated()) chunk.up = *reinterpret_cast<const float4*>(sums + columns);
        function(chunk, int64_t{first_row} + row, column);
    }
}

// The chunks of a tile of sums that a thread exchanges with other CTAs. In each pass, the CTA's threads take
// kRowsPerPass rows. Rows outside of the result are skipped.
template <int kRows, int kColumns, int kThreads>
struct OwnSums {
    static constexpr int kPerRow = kColumns / kEpilogueColumns, kRowsPerPass = kThreads / kPerRow;
    static constexpr int kPasses = kRows / kRowsPerPass;
    static_assert(kRows % kRowsPerPass == 0, "passes must cover the tile exactly");

    float* first;   // this thread's first chunk, in shared memory
    int rows_left;  // rows of the result in the tile, from this thread's first row on

    FASTATTN_DEVICE OwnSums(float* sSums, int rows_here) {
        const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow * kEpilogueColumns;
        first = sSums + row * SumsLayout<kColumns>::kRowElements + column;
        rows_left = rows_here - row;
    }

    FASTATTN_DEVICE bool exists(int pass) const { return pass * kRowsPerPass < rows_left; }

    FASTATTN_DEVICE float4& sums(int pass) const {
        return *reinterpret_cast<float4*>(first + pass * kRowsPerPass * SumsLayout<kColumns>::kRowElements);
    }

    // In a workspace slot, neighbouring threads have neighbouring chunks.
    FASTATTN_DEVICE float4& partial(float* slot, int pass) const {
        return reinterpret_cast<float4*>(slot)[pass * kThreads + threadIdx.x];
    }
};

// Adds up the partials of a tile in a fixed order, so that results repeat bit by bit. This CTA's own partial is in
// shared memory; the whole sum replaces it there. The accumulators' registers are free now. They hold 36 chunks:
// kPassesAtOnce sums, and for each sum as many partials as fit.
template <int kPassesAtOnce, typename Own>
FASTATTN_DEVICE void add_partials_of_passes(const Own& own, float* slots, int64_t slot_elements,
                                            const SumPartials& partials, int own_partial) {
    constexpr int kPartialsAtOnce = std::min(16, 36 / kPassesAtOnce - 1);
    static_assert(kPartialsAtOnce > 0 && Own::kPasses % kPassesAtOnce == 0, "whole rounds cover the tile exactly");
#pragma unroll 1
    for (int first_pass = 0; own.exists(first_pass); first_pass += kPassesAtOnce) {
        float4 sums[kPassesAtOnce] = {}, own_sums[kPassesAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kPassesAtOnce; ++i) {
            if (own.exists(first_pass + i)) own_sums[i] = own.sums(first_pass + i);
        }
#pragma unroll 1
        for (int first_partial = 0; first_partial < partials.count; first_partial += kPartialsAtOnce) {
            float4 more[kPartialsAtOnce][kPassesAtOnce] = {};
#pragma unroll
            for (int p = 0; p < kPartialsAtOnce; ++p) {
                const int partial = first_partial + p;
                float* slot = slots + partials.slot(partial) * slot_elements;
                const bool is_there = partial < partials.count && partial != own_partial;
#pragma unroll
                for (int i = 0; i < kPassesAtOnce; ++i) {
                    const int pass = first_pass + i;
                    if (is_there && own.exists(pass)) more[p][i] = __ldcg(&own.partial(slot, pass));
                }
            }
            __syncwarp();  // without it, nvcc adds the results of five loads before it starts more loads
#pragma unroll
            for (int p = 0; p < kPartialsAtOnce; ++p) {
                const bool is_own = first_partial + p == own_partial;
#pragma unroll
                for (int i = 0; i < kPassesAtOnce; ++i) {
                    const float4 partial = is_own ? own_sums[i] : more[p][i];
                    sums[i] = {sums[i].x + partial.x, sums[i].y + partial.y, sums[i].z + partial.z,
                               sums[i].w + partial.w};
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPassesAtOnce; ++i) {
            if (own.exists(first_pass + i)) own.sums(first_pass + i) = sums[i];
        }
    }
}

template <typename Own>
FASTATTN_DEVICE void add_partials(const Own& own, float* slots, int64_t slot_elements, const SumPartials& partials,
                                  int own_partial, int rows_here) {
    constexpr int kMostAtOnce = Own::kPasses <= 16 ? Own::kPasses : Own::kPasses / 2;
    const auto add = [&](auto passes_at_once) {
        add_partials_of_passes<passes_at_once.value>(own, slots, slot_elements, partials, own_partial);
    };
    if constexpr (kMostAtOnce <= 4) {  // few rows, and often many partials
        if (rows_here <= Own::kRowsPerPass) return add(std::integral_constant<int, 1>{});
    }
    add(std::integral_constant<int, kMostAtOnce>{});
}

// Prepares finish_tile(). Call it before the steps, which hide the trip to L2.
FASTATTN_DEVICE void open_tile(const MatmulEpilogue& epilogue, const MatmulWorkTile& work) {
    if (threadIdx.x == 0 && !is_whole(epilogue.schedule, work)) {
        open_arrivals(epilogue.arrivals + work.tile, epilogue.launch_id);
    }
}

// Returns true to the last CTA of a split tile, which then has the whole sums in shared memory. The other CTAs store
// their partials in the workspace. With more than 16 rows, a CTA first asks whether all others have arrived, as is
// usual if splits are long. If they have, it is the last CTA and need not store its partial. With fewer rows it does
// not ask: a partial then has only a few KB, which cost less than the trip to ask.
template <int kRows, int kColumns, int kThreads>
FASTATTN_DEVICE bool collects_partials(const MatmulEpilogue& epilogue, float* sSums, int32_t tile, int rows_here) {
    constexpr int64_t kSlotElements = kRows * kColumns;
    constexpr bool kAsks = kRows > 16;
    const OwnSums<kRows, kColumns, kThreads> own(sSums, rows_here);
    const SumPartials partials = sum_partials(epilogue.schedule, tile);
    const int own_partial = static_cast<int>(blockIdx.x) - partials.first_cta;
    uint64_t* arrivals = epilogue.arrivals + tile;
    bool is_last = false;
    if constexpr (kAsks) {
        is_last = threadIdx.x == 0 && arrives_if_last(arrivals, epilogue.launch_id, partials.count);
        is_last = __syncthreads_or(is_last);
    }
    if (!is_last) {
        float* slot = epilogue.partial + partials.slot(own_partial) * kSlotElements;
        for (int pass = 0; own.exists(pass); ++pass) own.partial(slot, pass) = own.sums(pass);
        __syncthreads();  // waits until every thread has stored its sums
        is_last = threadIdx.x == 0 && arrives_last(arrivals, partials.count);
        if (!__syncthreads_or(is_last)) return false;
    }
    add_partials(own, epilogue.partial, kSlotElements, partials, own_partial, rows_here);
    __syncthreads();  // waits for the whole tile: with SwiGLU a thread finishes sums that other threads added up
    return true;
}

// Writes a tile's result in the last CTA of the tile, and returns true only to that CTA. All threads are done with
// sSums afterwards.
template <DataType kDataType, int kRows, int kColumns, int kThreads>
FASTATTN_DEVICE bool finish_tile(const MatmulEpilogue& epilogue, float* sSums, const MatmulWorkTile& work) {
    const TilePosition position = tile_position(epilogue.schedule, work.tile);
    const int rows_here = min(kRows, epilogue.out.rows - position.m_tile * kRows);
    const bool is_complete = is_whole(epilogue.schedule, work) ||
                             collects_partials<kRows, kColumns, kThreads>(epilogue, sSums, work.tile, rows_here);
    if (is_complete) {
        for_own_chunks<kRows, kColumns, kThreads>(epilogue, sSums, position,
                                                  [&](const ChunkSums& sums, int64_t row, int32_t column) {
                                                      finish<kDataType>(epilogue, sums, row, column);
                                                  });
    }
    __syncthreads();  // waits until every thread has read the sums
    return is_complete;
}

}  // namespace fastattn
