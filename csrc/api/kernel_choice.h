// Which kernel runs a call on a GPU. The ops launch what these functions choose, and Python asks them for its name.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/backward.h"
#include "attention/forward.h"
#include "decode/decode.h"
#include "host/sm_rates.h"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/work.h"

namespace fastattn {

// What decides which forward kernel runs, beside head dims and dtype.
struct ForwardTraits {
    bool changes_scores;  // which are more than scaled and masked by a window
    bool is_paged;
};

// The kernel with options also computes what the plain one does not have:
// keys in pages, before Hopper.
inline KernelTable<AttentionForwardParams>::Row& forward_kernel(int32_t compute_capability, KernelSize head_dims,
                                                                DataType dtype, const ForwardTraits& traits) {
    if (!traits.changes_scores) {
        auto* plain = attention_forward_kernels().find_or_null(compute_capability, head_dims, dtype, traits.is_paged);
        if (plain != nullptr) return *plain;
    }
    return attention_forward_options_kernels().find(compute_capability, head_dims, dtype, traits.is_paged);
}

// Of one backward pass. shared_bytes: that a CTA can have on the GPU. Null: not for this call.
struct BackwardKernels {
    using Row = BackwardKernelTable::Row;
    Row *rows, *key_value, *query, *bias, *sinks, *slopes, *slope_sums;

    std::array<Row*, 7> in_order() const { return {rows, key_value, query, bias, sinks, slopes, slope_sums}; }
};

// Beside those of query, key and value.
struct BackwardGradients {
    bool bias, sinks, slopes;
};

inline BackwardKernels backward_kernels(int32_t compute_capability, int32_t shared_bytes, KernelSize head_dims,
                                        DataType dtype, bool changes_scores, const BackwardGradients& wanted) {
    BackwardKernels kernels{};
    kernels.rows = &attention_backward_rows_kernels().find(compute_capability, 0, dtype, false);
    kernels.key_value = &attention_backward_key_value_kernels().find(compute_capability, head_dims, dtype,
                                                                     changes_scores, shared_bytes);
    // It reads what that one has written: sums in its own order.
    const KernelKey& key = kernels.key_value->key;
    kernels.query = &attention_backward_query_kernels().find(key.architecture, key.size, dtype, false);
    if (wanted.bias) kernels.bias = &attention_backward_bias_kernels().find(compute_capability, 0, dtype, false);
    if (wanted.sinks) {
        kernels.sinks = &attention_backward_sinks_kernels().find(compute_capability, 0, std::nullopt, false);
    }
    if (wanted.slopes) {
        kernels.slopes = &attention_backward_slopes_kernels().find(compute_capability, 0, dtype, false);
        kernels.slope_sums = &attention_backward_slope_sums_kernels().find(compute_capability, 0, std::nullopt, false);
    }
    return kernels;
}

// What of a matmul with int8 weights a table of kernels computes best, and how: sums [tokens, outputs], each of `depth`.
struct Int8Choice {
    Int8KernelTable::Row* kernel;
    MatmulChoice choice;
};

inline Int8Choice int8_kernel(Int8KernelTable& table, int32_t compute_capability, int32_t num_sms, DataType dtype,
                              int32_t tokens, int32_t outputs, int32_t depth) {
    std::vector<MatmulTile> tiles;
    tiles.reserve(8);
    table.for_each_tile(compute_capability, dtype, [&](const Int8TileFacts& tile) { tiles.push_back(tile.matmul); });
    const MatmulChoice choice = fastest_tile(tokens, outputs, depth, tiles, sm_rates(compute_capability), num_sms);
    return {&table.find(compute_capability, choice.tile.tokens, dtype, false), choice};
}

}  // namespace fastattn
