// Declares the native int8 matmul kernels for host code: their parameters, and the tables in which they are found.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/kernel_table.h"
#include "host/params.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// A matrix [rows, columns] of 16-bit elements. Each row is contiguous; row_stride counts elements. In an input, the
// base and the row stride are multiples of 16 bytes. Rows do not overlap. The memory between rows may hold anything.
template <typename Element>
struct MatrixView {
    Element* data;
    int32_t rows, columns;
    int64_t row_stride;

    // Returns whether every row starts at a multiple of 16 bytes.
    FASTATTN_HOST_DEVICE bool is_aligned() const {
        return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(row_stride) * sizeof(Element)) % 16 == 0;
    }
};

// The weights W [N, K] = [rows, columns], int8. Each row is contiguous. The base and the row stride are multiples of 16
// bytes. Rows do not overlap. The memory between rows may hold anything.
// The element W[n, k] is data[n * row_stride + k] * scale[n * scale_row_stride + (k / kSmallestGroup >> group_shift)].
// Who multiplies by the scales: epilogue.cuh by those of the whole tensor or of channels, gemm_sm80.cuh, gemm_s8_*.cuh
// and group_factors_sm90.cuh by those of groups, gemm_s8_*.cuh by the tokens' scales, and for dX grad_input_sm80.cuh
// and scale_factors_sm90.cuh.
struct Int8WeightView {
    static constexpr int32_t kOneGroup = 31;  // the group_shift of weights with one scale for each row
    static constexpr int32_t kSmallestGroup = 32;
    const int8_t* data;
    int32_t rows, columns;
    int64_t row_stride;
    const float* scale;
    int32_t scale_row_stride;  // 0: all rows share one scale
    int32_t groups;            // in a row: the number of its scales
    int32_t group_shift;       // a group has kSmallestGroup << group_shift columns
};

// The most products x * w whose sum fits into int32. Quantised activations x are from -127 to 127, weights w from -128
// to 127.
inline constexpr int32_t kMostInt8SumK = 1 << 17;

inline constexpr int32_t kEpilogueColumns = 4;  // columns of the result that a thread finishes at once

// kSwiglu computes silu(gate) * up. Each element of the result then needs two sums, so the sums have shape [rows, 2 *
// columns]: first all gates, then all ups.
enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kSwiglu };

// How the sums [rows, sum_columns()] of a matmul become its result: activation(scale * sum + bias) + residual. It is
// computed in fp32 and rounded once, at the end. If several CTAs split the steps of a tile, they exchange their sums
// through `partial`.
struct MatmulEpilogue {
    const float* scale;    // [sum_columns()]; null: the scale is 1
    int32_t scale_stride;  // 0: all columns have the same scale
    const uint16_t* bias;  // [sum_columns()], or null
    Activation activation;
    MatrixView<const uint16_t> residual;  // data is null if there is no residual
    MatrixView<uint16_t> out;
    MatmulSchedule schedule;
    float* partial;  // [num_workspace_slots(schedule), a tile's sums in the kernel's order]; null if no tile is split
    uint64_t* arrivals;  // [split tiles, CTAs of a cluster], see scheduler/arrivals.cuh
    uint64_t launch_id;

    FASTATTN_HOST_DEVICE bool is_gated() const { return activation == Activation::kSwiglu; }
    FASTATTN_HOST_DEVICE int32_t sum_columns() const { return is_gated() ? 2 * out.columns : out.columns; }
    // Returns how many columns of the result come from a tile with tile_columns columns of sums.
    FASTATTN_HOST_DEVICE int32_t result_columns(int32_t tile_columns) const {
        return is_gated() ? tile_columns / 2 : tile_columns;
    }
};

// The gradient of a bias, which is dY summed over M. Only the input-gradient kernels compute it.
struct TokenSumsView {
    uint16_t* out;       // [columns]; null if this gradient is not wanted
    int32_t columns;     // N, rounded up to a multiple of kEpilogueColumns
    float* partial;      // [tiles of M, columns]; null if there is only one tile of M
    uint64_t* arrivals;  // [columns of CTAs], see scheduler/arrivals.cuh; the launch ID is the epilogue's
};

// Up to these numbers of tokens and of elements, each CTA quantises all tokens that it needs: tokens_of_cta.cuh counts
// the cost. Larger inputs are quantised only once, into memory that all CTAs read. Only the smallest tile, which suits
// so few tokens, has code for the former.
inline constexpr int32_t kMostTokensOfEachCta = 8, kMostElementsOfEachCta = 1 << 15, kBlockMOfEachCta = 16;

inline bool each_cta_quantises(int32_t block_m, int32_t tokens, int32_t columns) {
    return block_m == kBlockMOfEachCta && tokens <= kMostTokensOfEachCta &&
           int64_t{tokens} * columns <= kMostElementsOfEachCta;
}

// The memory for a matmul's tokens as int8 numbers. Hopper's matmul kernels only read it: a separate kernel, launched
// before them, fills it, without the counters. The sm_80 matmul kernels fill it themselves, and count in `queue` and
// `finished`, which need no initial value (see scheduler/launch_counter.cuh). If each_cta_quantises(), sm_80 launches
// get null for all pointers, and use the tile with the fewest rows.
struct QuantizedTokens {
    int8_t* data;        // [rows, columns] of the input, contiguous, with a base that is a multiple of 16 bytes
    float* scale;        // [rows]
    uint64_t* queue;     // counts how often CTAs have taken tokens
    uint64_t* finished;  // [tiles of tokens]: counts how often CTAs have finished tokens that they took
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

// The tile of a kernel, in two forms. TileFacts names its sizes after the weights [N, K]. `matmul` is the scheduler's
// form: its N is the columns of the result, and its K the length of the sums. For the input gradient these are K and N
// of the weights.
struct Int8TileFacts : TileFacts {
    MatmulTile matmul;
};

template <typename Tile>
constexpr Int8TileFacts int8_tile_facts() {
    return {{Tile::kBlockM, Tile::kBlockN, Tile::kBlockK, Tile::kNumWarps, Tile::kMatmulTile.ctas_per_sm},
            Tile::kMatmulTile};
}

// In a key of this table, `size` is the rows of a tile, and `flag` says whether weights have scales for groups along
// K.
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

// Kernels with int8 activations. They multiply the sums by the scales of weights and tokens before the epilogue, so
// epilogue.scale must be null.
inline Int8KernelTable& int8_matmul_s8_kernels() {
    static auto& table = *new Int8KernelTable("int8_matmul with int8 activations");
    return table;
}

// Kernels that quantise tokens for matmul kernels that do not quantise them (Hopper's).
inline KernelTable<Int8MatmulParams>& int8_quantize_tokens_kernels() {
    static auto& table = *new KernelTable<Int8MatmulParams>("int8 activations");
    return table;
}

}  // namespace fastattn
