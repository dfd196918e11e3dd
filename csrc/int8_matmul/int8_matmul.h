// The native int8 matmul kernels, as the host sees them.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/kernel_table.h"
#include "host/params.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// [rows, columns] of 16-bit elements, rows contiguous. Base and row stride (in elements) of an input are multiples of
// 16 bytes, and rows do not overlap; what lies between rows may be anything.
template <typename Element>
struct MatrixView {
    Element* data;
    int32_t rows, columns;
    int64_t row_stride;
};

// W [N, K] int8, rows contiguous. Base and row stride are multiples of 16 bytes, and rows do not overlap; what lies
// between rows may be anything.
// Its element (n, k) is data[n, k] * scale[n * scale_row_stride + (k / kSmallestGroup >> group_shift)].
struct Int8WeightView {
    static constexpr int32_t kOneGroup = 31;  // group_shift where a row has one scale
    static constexpr int32_t kSmallestGroup = 32;
    const int8_t* data;
    int32_t rows, columns;
    int64_t row_stride;
    const float* scale;
    int32_t scale_row_stride;  // 0: all rows have the same scales
    int32_t groups;            // of a row
    int32_t group_shift;       // a group has kSmallestGroup << group_shift columns
};

// Sums of so many products of int8 numbers, -128 included, fit into int32.
inline constexpr int32_t kMaxInt8SumK = 1 << 17;

inline constexpr int32_t kEpilogueColumns = 4;  // that a thread finishes at once

// SwiGLU, silu(gate) * up, has two sums for each element of the result: [rows, 2 * columns], the gates first.
enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kSwiglu };

// How the sums [rows, sum_columns()] of a matmul become its result: activation(scale * sum + bias) + residual, in fp32
// with one rounding at the end. The CTAs of a split tile leave their sums in `partial`.
struct MatmulEpilogue {
    const float* scale;    // [sum_columns()], or null: 1
    int32_t scale_stride;  // 0: all columns have the same scale
    const uint16_t* bias;  // [sum_columns()], or null
    Activation activation;
    MatrixView<const uint16_t> residual;  // data is null where there is none
    MatrixView<uint16_t> out;
    MatmulSchedule schedule;
    float* partial;      // [num_slots(schedule), sums of a tile as the kernel orders them], or null: no tile is split
    uint64_t* arrivals;  // [split tiles, CTAs of a cluster], see scheduler/arrivals.cuh
    uint64_t launch_id;

    FASTATTN_HOST_DEVICE bool is_gated() const { return activation == Activation::kSwiglu; }
    FASTATTN_HOST_DEVICE int32_t sum_columns() const { return is_gated() ? 2 * out.columns : out.columns; }
    // Returns how many columns of the result a tile of so many columns of sums makes.
    FASTATTN_HOST_DEVICE int32_t result_columns(int32_t tile_columns) const {
        return is_gated() ? tile_columns / 2 : tile_columns;
    }
};

// For grad_input: the gradient of a bias, which is dY summed over M.
struct TokenSumsView {
    uint16_t* out;       // [columns], or null: not wanted
    int32_t columns;     // N, rounded up to a multiple of kEpilogueColumns
    float* partial;      // [tiles of M, columns]; null if there is one tile
    uint64_t* arrivals;  // [columns of CTAs], see scheduler/arrivals.cuh; the launch ID is the epilogue's
};

// The most tokens, and elements, that every CTA quantises for itself: tokens_of_cta.cuh counts the cost. More are
// quantised once, into memory that all CTAs then read.
inline constexpr int32_t kMostTokensOfEachCta = 8, kMostElementsOfEachCta = 1 << 15;

FASTATTN_HOST_DEVICE bool each_cta_quantises(int32_t tokens, int32_t columns) {
    return tokens <= kMostTokensOfEachCta && int64_t{tokens} * columns <= kMostElementsOfEachCta;
}

// Where a launch stores its tokens as int8 numbers. For Hopper's kernels, the launch before stores them and counts
// nothing. The counters need no initial value: see scheduler/launch_counter.cuh. For sm_80's kernels all is null if
// each_cta_quantises(); they take the smallest tile then.
struct QuantizedTokens {
    int8_t* data;        // [rows, columns] of the input, contiguous, with a base that is a multiple of 16 bytes
    float* scale;        // [rows]
    uint64_t* queue;     // how often CTAs have taken tokens
    uint64_t* finished;  // [tiles of tokens]: how often CTAs have finished tokens that they took
    uint64_t launch_id;
};

struct Int8MatmulParams {
    MatrixView<const uint16_t> input;  // x [M, K], or dY [M, N]
    Int8WeightView weight;
    MatmulEpilogue epilogue;
    TokenSumsView token_sums;
    QuantizedTokens quantized;
};

// A block of the weights to dequantise: rows [first_row, first_row + rows), and likewise columns.
struct DequantizeWeightParams {
    Int8WeightView weight;
    int32_t first_row, rows, first_column, columns;
    uint16_t* out;  // [rows, columns rounded up to a multiple of 16], with a base that is a multiple of 16 bytes
    int64_t out_stride;
};

// `matmul`: the tile as the scheduler sees it. Its N and K are those of the kernel's own sums.
struct Int8TileFacts : TileFacts {
    MatmulTile matmul;
};

template <typename Tile>
constexpr Int8TileFacts int8_tile_facts() {
    return {{Tile::kBlockM, Tile::kBlockN, Tile::kBlockK, Tile::kNumWarps, Tile::kMatmulTile.ctas_per_sm},
            Tile::kMatmulTile};
}

// A table of kernels. A key's size is the rows of a tile, and its variant says whether weights have scales for groups
// along K.
using Int8KernelTable = KernelTable<Int8MatmulParams, Int8TileFacts>;

inline Int8KernelTable& int8_matmul_kernels() {
    static auto& table = *new Int8KernelTable("int8_matmul");
    return table;
}

inline Int8KernelTable& int8_matmul_grad_input_kernels() {
    static auto& table = *new Int8KernelTable("int8_matmul_grad_input");
    return table;
}

using DequantizeWeightKernelTable = KernelTable<DequantizeWeightParams>;

inline DequantizeWeightKernelTable& int8_dequantize_weight_kernels() {
    static auto& table = *new DequantizeWeightKernelTable("dequantising int8 weights");
    return table;
}

// Kernels with int8 activations. epilogue.scale is null, because all scales have to be multiplied in one place.
inline Int8KernelTable& int8_matmul_s8_kernels() {
    static auto& table = *new Int8KernelTable("int8_matmul with int8 activations");
    return table;
}

// Kernels that make the int8 activations where the matmul does not make them itself.
inline KernelTable<Int8MatmulParams>& int8_quantize_tokens_kernels() {
    static auto& table = *new KernelTable<Int8MatmulParams>("int8 activations");
    return table;
}

}  // namespace fastattn
