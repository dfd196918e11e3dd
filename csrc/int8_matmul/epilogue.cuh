// Turns the sums of a matmul into its result: scale → bias → activation → residual, and one rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/prefetch.cuh"
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

// Returns the epilogue of an input gradient. It only rounds the sums, and the compiler leaves out everything else.
FASTATTN_DEVICE MatmulEpilogue rounding_only(MatmulEpilogue epilogue) {
    epilogue.scale = nullptr;
    epilogue.bias = nullptr;
    epilogue.activation = Activation::kNone;
    epilogue.residual.data = nullptr;
    return epilogue;
}

// Applies the activation to four columns of several rows. NaN stays NaN.
template <int kRows>
FASTATTN_DEVICE void activate(Activation activation, float (&values)[kRows][kEpilogueColumns]) {
    constexpr float kSqrtHalf = 0.707106781186547524f, kSqrt2OverPi = 0.797884560802865356f;
    const auto for_each_value = [&](auto&& function) {
        constexpr int kTogether = ceil_div(kRows, 4);
        static_assert(kRows % kTogether == 0, "each row must be activated once");
#pragma unroll 1  // one copy of the function serves all rows: they rotate through the registers of the first
        for (int row = 0; row < kRows; row += kTogether) {
#pragma unroll
            for (int e = 0; e < kEpilogueColumns; ++e) {
                float first[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) first[i] = function(values[i][e]);
#pragma unroll
                for (int i = kTogether; i < kRows; ++i) values[i - kTogether][e] = values[i][e];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) values[kRows - kTogether + i][e] = first[i];
            }
        }
    };
    switch (activation) {
        case Activation::kNone:
            break;
        case Activation::kRelu:
            for_each_value([](float x) { return x < 0.0f ? 0.0f : x; });
            break;
        case Activation::kGelu:
            for_each_value([](float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); });
            break;
        case Activation::kGeluTanh:
            for_each_value(
                [](float x) { return 0.5f * x * (1.0f + tanhf((x + 0.044715f * x * x * x) * kSqrt2OverPi)); });
            break;
        case Activation::kSilu:
        case Activation::kSwiglu:  // applied to the gates
            for_each_value([](float x) { return x / (1.0f + expf(-x)); });
            break;
    }
}

// Four neighbouring 16-bit elements of a row, of which the first `count` exist. The others are -0.0, which changes no
// sum. One instruction loads or stores all four, if all exist and are aligned. If the width of a result is not a
// multiple of 4, few rows are aligned.
struct FourElements {
    uint2 bits{0x80008000, 0x80008000};

    FASTATTN_DEVICE static bool is_vector(const uint16_t* elements, int count) {
        return count == kEpilogueColumns && reinterpret_cast<uintptr_t>(elements) % sizeof(uint2) == 0;
    }

    FASTATTN_DEVICE void load(const uint16_t* elements, int count) {
        if (is_vector(elements, count)) {
            bits = *reinterpret_cast<const uint2*>(elements);
            return;
        }
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) {
            uint32_t& pair = e < 2 ? bits.x : bits.y;
            if (e < count) pair = __byte_perm(pair, elements[e], e % 2 == 0 ? 0x3254 : 0x5410);
        }
    }

    FASTATTN_DEVICE void store(uint16_t* elements, int count) const {
        if (is_vector(elements, count)) {
            *reinterpret_cast<uint2*>(elements) = bits;
            return;
        }
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) {
            if (e < count) elements[e] = static_cast<uint16_t>((e < 2 ? bits.x : bits.y) >> e % 2 * 16);
        }
    }

    template <DataType kDataType>
    FASTATTN_DEVICE float at(int e) const {
        return unpack<kDataType>(static_cast<uint16_t>((e < 2 ? bits.x : bits.y) >> e % 2 * 16));
    }
};

// The columns of the result that a thread finishes: the same four in each of its rows of a tile. With SwiGLU, the left
// half of the tile's columns of sums are gates, and the right half the ups of the same columns of the result.
template <DataType kDataType, int kColumns, int kThreads>
struct OwnColumns {
    static constexpr int kRowsAtOnce = 4;  // that a thread computes together: their loads of the residual take one trip
    static constexpr int kChunksPerRow = kColumns / kEpilogueColumns, kRowElements = SumsLayout<kColumns>::kRowElements;
    static_assert((kChunksPerRow & (kChunksPerRow - 1)) == 0 && kThreads % kChunksPerRow == 0,
                  "threads take whole rows");

    // Holds the scales and biases that turn the sums of four columns into pre-activations.
    struct Affine {
        float scale[kEpilogueColumns];
        FourElements bias;

        // Loads the scales and biases of columns sum_column and following of the sums, `count` of which exist.
        FASTATTN_DEVICE void load(const MatmulEpilogue& epilogue, int32_t sum_column, int count) {
#pragma unroll
            for (int e = 0; e < kEpilogueColumns; ++e) {
                scale[e] = 1.0f;
                if (epilogue.scale != nullptr && e < count) {
                    scale[e] = epilogue.scale[(sum_column + e) * epilogue.scale_stride];
                }
            }
            bias = {};
            if (epilogue.bias != nullptr) bias.load(epilogue.bias + sum_column, count);
        }

        FASTATTN_DEVICE void apply(float (&values)[kEpilogueColumns], const float* sums) const {
            const float4 four = *reinterpret_cast<const float4*>(sums);
            const float all[kEpilogueColumns] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < kEpilogueColumns; ++e) values[e] = all[e] * scale[e] + bias.template at<kDataType>(e);
        }
    };

    int32_t column;  // the first of the four
    int count;       // how many of them exist
    Affine first, up;

    // Loads what the epilogue needs of a tile's columns. Called before barriers or steps, which hide the trips.
    FASTATTN_DEVICE void load(const MatmulEpilogue& epilogue, int32_t n_tile) {
        column = n_tile * epilogue.result_columns(kColumns) + column_in_tile(epilogue);
        count = min(kEpilogueColumns, epilogue.out.columns - column);
        first.load(epilogue, column, count);
        if (epilogue.is_gated()) up.load(epilogue, column + epilogue.out.columns, count);
    }

    // Brings the residual of this thread's first rows of a tile into L2. first_row: the tile's first row.
    FASTATTN_DEVICE void prefetch_residual(const MatmulEpilogue& epilogue, int32_t first_row) const {
        if (epilogue.residual.data == nullptr || count <= 0) return;
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const int32_t row = first_row + own_row(epilogue) + i * rows_of_pass(epilogue);
            if (row < epilogue.out.rows) ptx::prefetch_global_L2(at(epilogue.residual, row));
        }
    }

    // Computes and writes rows_here rows of the result, from first_row on. sSums: their sums, SumsLayout<kColumns>.
    FASTATTN_DEVICE void finish(const MatmulEpilogue& epilogue, const float* sSums, int32_t first_row,
                                int rows_here) const {
        if (count <= 0) return;
        const int distance = rows_of_pass(epilogue);
#pragma unroll 1
        for (int row = own_row(epilogue); row < rows_here; row += kRowsAtOnce * distance) {
            const auto exists = [&](int i) { return row + i * distance < rows_here; };
            FourElements residual[kRowsAtOnce];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                if (epilogue.residual.data != nullptr && exists(i)) {
                    residual[i].load(at(epilogue.residual, first_row + row + i * distance), count);
                }
            }
            const float* sums[kRowsAtOnce];
            float values[kRowsAtOnce][kEpilogueColumns];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                sums[i] = sSums + (row + (exists(i) ? i * distance : 0)) * kRowElements + column_in_tile(epilogue);
                first.apply(values[i], sums[i]);
            }
            activate(epilogue.activation, values);
            if (epilogue.is_gated()) {
#pragma unroll
                for (int i = 0; i < kRowsAtOnce; ++i) {
                    float ups[kEpilogueColumns];
                    up.apply(ups, sums[i] + kColumns / 2);
#pragma unroll
                    for (int e = 0; e < kEpilogueColumns; ++e) values[i][e] *= ups[e];
                }
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
                for (int e = 0; e < kEpilogueColumns; ++e) values[i][e] += residual[i].template at<kDataType>(e);
                const FourElements result{
                    {pack<kDataType>(values[i][0], values[i][1]), pack<kDataType>(values[i][2], values[i][3])}};
                if (exists(i)) result.store(at(epilogue.out, first_row + row + i * distance), count);
            }
        }
    }

  private:
    // Returns threadIdx.x, hidden from the compiler, which would otherwise keep values that depend on it across tiles.
    FASTATTN_DEVICE static uint32_t thread() { return ptx::tid_x(); }

    // The threads of a CTA take this many rows of sums at a time, with neighbouring threads in a row.
    FASTATTN_DEVICE static int rows_of_pass(const MatmulEpilogue& epilogue) {
        return kThreads / kChunksPerRow << epilogue.is_gated();
    }
    FASTATTN_DEVICE static int own_row(const MatmulEpilogue& epilogue) {
        return (thread() << epilogue.is_gated()) / kChunksPerRow;
    }
    FASTATTN_DEVICE static int column_in_tile(const MatmulEpilogue& epilogue) {
        return (thread() & ((kChunksPerRow >> epilogue.is_gated()) - 1)) * kEpilogueColumns;
    }
    template <typename Element>
    FASTATTN_DEVICE Element* at(const MatrixView<Element>& matrix, int32_t row) const {
        return matrix.data + row * matrix.row_stride + column;
    }
};

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

// Finishes one tile at a time. Called by all threads of a CTA.
template <DataType kDataType, int kRows, int kColumns, int kThreads>
struct TileEpilogue {
    // With few rows, loading the weights takes longest, and registers are free. So the scales and biases are loaded
    // before the steps. After them, each load would add a whole trip to memory.
    static constexpr bool kLoadsEarly = kRows <= 32;

    const MatmulEpilogue& params;
    OwnColumns<kDataType, kColumns, kThreads> columns;

    FASTATTN_DEVICE explicit TileEpilogue(const MatmulEpilogue& params) : params(params) {}

    // Prepares finish(). Called before the steps, which hide the trips.
    FASTATTN_DEVICE void open(const MatmulWorkTile& work) {
        if (threadIdx.x == 0 && !is_whole(params.schedule, work)) {
            open_arrivals(params.arrivals + work.tile, params.launch_id);
        }
        if constexpr (kLoadsEarly) {
            const TilePosition position = tile_position(params.schedule, work.tile);
            columns.load(params, position.n_tile);
            columns.prefetch_residual(params, position.m_tile * kRows);
        }
    }

    // Writes a tile's result in the last CTA of the tile, and returns true only to that CTA. Called when a thread has
    // stored its sums in sSums. All threads are done with sSums afterwards.
    FASTATTN_DEVICE bool finish(float* sSums, const MatmulWorkTile& work) {
        const TilePosition position = tile_position(params.schedule, work.tile);
        const int32_t first_row = position.m_tile * kRows;
        const int rows_here = min(kRows, params.out.rows - first_row);
        if constexpr (!kLoadsEarly) columns.load(params, position.n_tile);
        __syncthreads();  // waits until every warp's sums are in the tile
        const bool is_complete = is_whole(params.schedule, work) ||
                                 collects_partials<kRows, kColumns, kThreads>(params, sSums, work.tile, rows_here);
        if (is_complete) columns.finish(params, sSums, first_row, rows_here);
        __syncthreads();  // waits until every thread has read the sums
        return is_complete;
    }
};

}  // namespace fastattn
