// Chooses the kernel that runs a call on a GPU. The ops launch it, and Python asks for its name.
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
#include "host/last_answers.h"
#include "host/sm_rates.h"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/ways.h"
#include "scheduler/choose_matmul_tile.h"

namespace fastattn {

// The traits of a call that, with head dims and dtype, decide which forward kernel runs it.
struct ForwardTraits {
    bool changes_scores;  // by options other than the scale and a window
    bool is_paged;
};

// Returns the forward kernel for a call. Before Hopper, only the kernels with options read paged keys. shared_bytes: the
// most shared memory that a CTA can have on the GPU.
inline KernelTable<AttentionForwardParams>::Row& forward_kernel(int32_t compute_capability, int32_t shared_bytes,
                                                                KernelSize head_dims, DataType dtype,
                                                                const ForwardTraits& traits) {
    if (!traits.changes_scores) {
        auto* plain = attention_forward_kernels().find_or_null(compute_capability, head_dims, dtype, traits.is_paged,
                                                               shared_bytes);
        if (plain != nullptr) return *plain;
    }
    return attention_forward_options_kernels().find(compute_capability, head_dims, dtype, traits.is_paged);
}

// The kernels of one backward pass; null where a call does not need the kernel.
struct BackwardKernels {
    using Row = BackwardKernelTable::Row;
    Row *ranges, *rows, *key_value, *query, *bias, *sinks, *slopes, *slope_sums;

    std::array<Row*, 8> in_order() const { return {ranges, rows, key_value, query, bias, sinks, slopes, slope_sums}; }
};

// The traits of a call that, with head dims and dtype, decide which backward kernels run. With ranges of keys,
// changes_scores is true too.
struct BackwardTraits {
    bool changes_scores, has_ranges;
};

// The gradients that a call wants in addition to those of query, key and value.
struct BackwardGradients {
    bool bias, sinks, slopes;
};

// Returns the kernels for a call. shared_bytes: as for forward_kernel().
inline BackwardKernels backward_kernels(int32_t compute_capability, int32_t shared_bytes, KernelSize head_dims,
                                        DataType dtype, const BackwardTraits& traits, const BackwardGradients& wanted) {
    BackwardKernels kernels{};
    if (traits.has_ranges) {
        kernels.ranges = &attention_backward_ranges_kernels().find(compute_capability, 0, std::nullopt, false);
    }
    kernels.rows = &attention_backward_rows_kernels().find(compute_capability, 0, dtype, false);
    kernels.key_value = &attention_backward_key_value_kernels().find(compute_capability, head_dims, dtype,
                                                                     traits.changes_scores, shared_bytes);
    // The order of dQ's sums in memory is the key_value kernel's own, so the query kernel has to match that kernel.
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

// Returns the kernel of flash-decoding for `rows` query rows of a KV head. The kernel's tile has kFewRows rows if these
// hold all query rows, or if the larger tile does not fit in shared memory. widest: the larger of the two head dims.
inline KernelTable<DecodeParams>::Row& decode_kernel(int32_t compute_capability, int32_t shared_bytes, int32_t widest,
                                                     DataType dtype, CacheFormat format, int32_t rows) {
    auto& kernels = decode_split_kernels(format);
    if (rows > kFewRows) {
        auto* large = kernels.find_or_null(compute_capability, widest, dtype, /*flag=*/true, shared_bytes);
        if (large != nullptr) return *large;
    }
    return kernels.find(compute_capability, widest, dtype, /*flag=*/false);
}

// How a matmul with int8 weights is computed. Holds the fastest of our kernels with its predicted clocks, and the
// predicted clocks of dequantising the weights for cuBLAS, which are infinity if cuBLAS cannot compute the call.
struct Int8Choice {
    Int8KernelTable::Row* kernel;
    MatmulChoice choice;
    double dequantised_clocks;
    bool dequantises;  // whether cuBLAS on dequantised weights runs instead of the kernel
};

inline constexpr const char* kDequantisedName = "dequantise + cuBLAS";

// Dequantising is chosen only if it is predicted to be faster by this fraction. The reasons are that predictions may be
// wrong by as much (an assumption), and that our kernels need no memory for 16-bit weights.
inline constexpr double kErrorOfPredictions = 0.15;

// The traits of a matmul that, with its sizes, decide which kernel computes it.
struct Int8Traits {
    DataType dtype;
    bool has_groups;           // scales are per group along K
    bool is_plain;             // 16-bit input, and no bias, activation or residual
    bool sums_tokens = false;  // also sums dY over tokens, for the gradient of a bias

    bool operator==(const Int8Traits&) const = default;
};

// Restricts the choice of kernels in this process, for tests and benchmarks that compare them: only kernels for
// `architecture` with tiles of block_m tokens are chosen, where 0 means any. With kForcesDequantising as the
// architecture, cuBLAS is chosen wherever it can compute the call.
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

// Finds how a matmul of sizes M, N and K is computed fastest. int8_kernel() remembers the results.
inline Int8Choice search_int8_kernel(Int8KernelTable& table, int32_t compute_capability, int32_t num_sms,
                                     const Int8Traits& traits, int32_t M, int32_t N, int32_t K) {
    std::vector<Int8KernelTable::Row*> rows;
    std::vector<MatmulTile> tiles;
    rows.reserve(16);
    tiles.reserve(16);
    table.for_each_row(compute_capability, traits.dtype, traits.has_groups, [&](Int8KernelTable::Row& row) {
        if (!forced_int8_tile().allows(row.key)) return;
        rows.push_back(&row);
        tiles.push_back(row.tile.matmul);
        tiles.back().has_group_scales = traits.has_groups;
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

// Chooses how a matmul of sizes M, N and K is computed. Keeps the last answers: the layers of a model have a few
// shapes, and the search takes longer than a launch.
inline Int8Choice int8_kernel(Int8KernelTable& table, int32_t compute_capability, int32_t num_sms,
                              const Int8Traits& traits, int32_t M, int32_t N, int32_t K) {
    struct Call {
        Int8KernelTable* table;
        int32_t compute_capability, num_sms, M, N, K;
        Int8Traits traits;
        int32_t forced_architecture, forced_block_m;

        bool operator==(const Call&) const = default;
    };
    const Call call{&table,
                    compute_capability,
                    num_sms,
                    M,
                    N,
                    K,
                    traits,
                    forced_int8_tile().architecture,
                    forced_int8_tile().block_m};
    thread_local LastAnswers<Call, Int8Choice, 16> answers;
    return answers.find_or(call,
                           [&] { return search_int8_kernel(table, compute_capability, num_sms, traits, M, N, K); });
}

}  // namespace fastattn
