// Which kernel runs a call on a GPU. The ops launch what these functions choose, and Python asks them for its name.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/backward.h"
#include "attention/forward.h"
#include "decode/decode.h"
#include "host/sm_rates.h"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/ways.h"
#include "scheduler/choose_stream_k.h"

namespace fastattn {

// Beside head dims and dtype, these decide which forward kernel runs.
struct ForwardTraits {
    bool changes_scores;  // which are more than scaled and masked by a window
    bool is_paged;
};

// The kernel with options also computes what the plain one does not have: keys in pages, before Hopper.
inline KernelTable<AttentionForwardParams>::Row& forward_kernel(int32_t compute_capability, KernelSize head_dims,
                                                                DataType dtype, const ForwardTraits& traits) {
    if (!traits.changes_scores) {
        auto* plain = attention_forward_kernels().find_or_null(compute_capability, head_dims, dtype, traits.is_paged);
        if (plain != nullptr) return *plain;
    }
    return attention_forward_options_kernels().find(compute_capability, head_dims, dtype, traits.is_paged);
}

// The kernels of one backward pass; null where a call does not need one. shared_bytes: how much a CTA can have on the
// GPU.
struct BackwardKernels {
    using Row = BackwardKernelTable::Row;
    Row *ranges, *rows, *key_value, *query, *bias, *sinks, *slopes, *slope_sums;

    std::array<Row*, 8> in_order() const { return {ranges, rows, key_value, query, bias, sinks, slopes, slope_sums}; }
};

// Beside head dims and dtype, these decide which kernels run: scores are more than scaled and masked by a window, and
// there are ranges of keys, which are one of the reasons for that.
struct BackwardTraits {
    bool changes_scores, has_ranges;
};

// The gradients that a call wants beside those of query, key and value.
struct BackwardGradients {
    bool bias, sinks, slopes;
};

inline BackwardKernels backward_kernels(int32_t compute_capability, int32_t shared_bytes, KernelSize head_dims,
                                        DataType dtype, const BackwardTraits& traits, const BackwardGradients& wanted) {
    BackwardKernels kernels{};
    if (traits.has_ranges) {
        kernels.ranges = &attention_backward_ranges_kernels().find(compute_capability, 0, std::nullopt, false);
    }
    kernels.rows = &attention_backward_rows_kernels().find(compute_capability, 0, dtype, false);
    kernels.key_value = &attention_backward_key_value_kernels().find(compute_capability, head_dims, dtype,
                                                                     traits.changes_scores, shared_bytes);
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

// Finds flash-decoding's kernel: small tiles where they hold all rows of a KV head, or where large ones do not fit in
// shared memory.
inline KernelTable<DecodeParams>::Row& decode_kernel(int32_t compute_capability, int32_t shared_bytes, int32_t widest,
                                                     DataType dtype, CacheFormat format, int32_t rows) {
    auto& kernels = decode_split_kernels(format);
    if (rows > kFewRows) {
        auto* large = kernels.find_or_null(compute_capability, widest, dtype, /*variant=*/true, shared_bytes);
        if (large != nullptr) return *large;
    }
    return kernels.find(compute_capability, widest, dtype, /*variant=*/false);
}

// How a matmul with int8 weights is computed best: which of our kernels is the fastest, and the predicted clocks of it
// and of dequantising for cuBLAS, infinity where that does not compute the same.
struct Int8Choice {
    Int8KernelTable::Row* kernel;
    MatmulChoice choice;
    double dequantised_clocks;
    bool dequantises;  // for cuBLAS, instead of the kernel
};

inline constexpr const char* kDequantisedName = "dequantise + cuBLAS";

// By how much dequantising has to be predicted faster: predictions may be so wrong (an assumption), and our kernel
// needs no memory for weights in 16 bits.
inline constexpr double kErrorOfPredictions = 0.15;

// Beside its sizes, these decide which kernel computes a matmul.
struct Int8Traits {
    DataType dtype;
    bool has_groups;           // of scales, along K
    bool is_plain;             // a product alone, of 16-bit numbers: nothing is added, and no activation follows
    bool sums_tokens = false;  // sums dY over tokens, too, for the gradient of a bias
};

// Tests and benchmarks compare kernels: only those of this architecture with tiles of so many tokens are chosen, in
// this process. 0: any. kForcesDequantising: cuBLAS, wherever it can.
inline constexpr int32_t kForcesDequantising = -1;
struct ForcedInt8Tile {
    std::atomic<int32_t> architecture{0}, block_m{0};

    bool is_none() const { return architecture == 0 && block_m == 0; }
    bool is_dequantising() const { return architecture == kForcesDequantising; }

    bool allows(const KernelKey& key) const {
        return (architecture <= 0 || key.architecture == architecture) &&
               (block_m == 0 || key.size.head_dim == block_m);
    }
};

inline ForcedInt8Tile& forced_int8_tile() {
    static ForcedInt8Tile forced;
    return forced;
}

// Chooses how a matmul of sizes M, N and K is computed.
inline Int8Choice int8_kernel(Int8KernelTable& table, int32_t compute_capability, int32_t num_sms,
                              const Int8Traits& traits, int32_t M, int32_t N, int32_t K) {
    std::vector<Int8KernelTable::Row*> rows;
    std::vector<MatmulTile> tiles;
    rows.reserve(16);
    tiles.reserve(16);
    table.for_each_row(compute_capability, traits.dtype, traits.has_groups, [&](Int8KernelTable::Row& row) {
        if (!forced_int8_tile().allows(row.key)) return;
        rows.push_back(&row);
        tiles.push_back(row.tile.matmul);
        tiles.back().scales_groups = traits.has_groups;
    });
    const SmRates rates = sm_rates(compute_capability);
    const MatmulChoice choice = fastest_tile(M, N, K, tiles, rates, num_sms);
    if (choice.index == tiles.size()) {
        throw std::runtime_error("fastattn: no kernel of the int8 matmul runs on a GPU of compute capability " +
                                 std::to_string(compute_capability / 10) + '.' +
                                 std::to_string(compute_capability % 10) + " with " + std::to_string(num_sms) +
                                 " multiprocessors");
    }
    const bool may_dequantise =
        traits.is_plain && (forced_int8_tile().is_none() || forced_int8_tile().is_dequantising());
    double clocks = std::numeric_limits<double>::infinity();
    if (may_dequantise && K > 0) {
        clocks = dequantised_clocks(M, N, K, rates, num_sms);
        if (traits.sums_tokens) clocks += token_sum_clocks(M, K, rates, num_sms);
    }
    const bool dequantises = (1 + kErrorOfPredictions) * clocks < choice.clocks ||
                             (forced_int8_tile().is_dequantising() && std::isfinite(clocks));
    return {rows[choice.index], choice, clocks, dequantises};
}

}  // namespace fastattn
