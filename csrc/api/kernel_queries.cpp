// Answers questions about the native kernels that Python asks through ctypes. Uses the choices of kernel_choice.h.

#include <cstdint>
#include <exception>
#include <string>

#include "api/kernel_choice.h"
#include "api/scores.h"
#include "host/device_facts.h"
#include "host/listed_kernels.h"
#include "int8_matmul/int8_matmul.h"
#include "scheduler/choose_row_splits.h"
#include "scheduler/decode_splits.h"
#include "scheduler/launch_id.h"
#include "scheduler/stream_k.h"

namespace fastattn {
namespace {

std::string tile_text(const TileFacts& tile) {
    if (tile.block_m == 0) return "null";
    const std::string K = tile.block_k > 0 ? ", \"block_k\": " + std::to_string(tile.block_k) : "";
    return "{\"block_m\": " + std::to_string(tile.block_m) + ", \"block_n\": " + std::to_string(tile.block_n) + K +
           ", \"num_warps\": " + std::to_string(tile.num_warps) + "}";
}

DataType dtype_of(int32_t is_bfloat16) {
    return is_bfloat16 != 0 ? DataType::kBFloat16 : DataType::kFloat16;
}

// Returns the name of the kernel that row_of() returns, or null if it throws because there is none.
template <typename Function>
const char* name_or_null(Function&& row_of) {
    try {
        return row_of().name();
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Returns the table of int8_matmul (which = 0), of its input gradient (1), or of int8_matmul with int8 activations (2).
// Python uses the same numbers.
Int8KernelTable& int8_kernels(int32_t which) {
    return which == 0   ? int8_matmul_kernels()
           : which == 1 ? int8_matmul_grad_input_kernels()
                        : int8_matmul_s8_kernels();
}

// The division of a launch's steps among CTAs, and the number of its workspace slots.
struct LaunchSchedule {
    int64_t ctas, longest_steps, block_m, slots;
    double steps_of_full_gpu;  // int8 matmul only: see scheduler/choose_matmul_tile.h
};

// The fastest of our kernels (null if there is none) with its predicted time, and the predicted time of dequantising
// the weights for cuBLAS.
struct Int8Ways {
    const char* kernel;
    double kernel_microseconds, dequantised_microseconds;
};

// The largest K whose sums of int8 products are exact, and the count at which a launch's counters overflow.
struct Int8Limits {
    int64_t sum_depth, launch_count;
};

// The fields of RowSplits, heads_per_group, and the kernel's tile.
struct BackwardSchedule {
    int64_t first_tile, over_heads, over_rows, heads_per_group, block_m, block_n;
};

}  // namespace
}  // namespace fastattn

#define FASTATTN_ASKED_BY_PYTHON extern "C" __attribute__((visibility("default")))

// Returns the facts of the current CUDA device, or zeros if there is none.
FASTATTN_ASKED_BY_PYTHON fastattn::DeviceFacts fastattn_device_facts() {
    try {
        return fastattn::device_facts();
    } catch (const std::exception&) {
        return {};
    }
}

// Returns JSON that maps each kernel's name to its tile, {"attention_forward_sm80<64, bfloat16>": {"block_m": …}, …}. A
// kernel without a tile maps to null.
FASTATTN_ASKED_BY_PYTHON const char* fastattn_kernels() {
    using namespace fastattn;
    static const std::string text = [] {
        std::string all;
        for (const ListedKernel& kernel : listed_kernels()) {
            all += std::string(all.empty() ? "\"" : ", \"") + kernel.name + "\": " + tile_text(kernel.tile);
        }
        return '{' + all + '}';
    }();
    return text.c_str();
}

// Returns the name of the kernel that runs a call, or null if none does.
FASTATTN_ASKED_BY_PYTHON const char* fastattn_attention_forward_kernel(int32_t compute_capability, int32_t shared_bytes,
                                                                       int32_t head_dim, int32_t value_dim,
                                                                       int32_t is_bfloat16, int32_t changes_scores,
                                                                       int32_t is_paged) {
    using namespace fastattn;
    const KernelSize head_dims(head_dim, value_dim);
    const ForwardTraits traits{changes_scores != 0, is_paged != 0};
    return name_or_null([&]() -> auto& {
        return forward_kernel(compute_capability, shared_bytes, head_dims, dtype_of(is_bfloat16), traits);
    });
}

// Writes the names of the kernels that run a call to `names`, in launch order. Returns their number, at most 8, or 0 if
// no kernels run the call.
FASTATTN_ASKED_BY_PYTHON int32_t fastattn_attention_backward_kernels(int32_t compute_capability, int32_t shared_bytes,
                                                                     int32_t head_dim, int32_t value_dim,
                                                                     int32_t is_bfloat16, int32_t changes_scores,
                                                                     int32_t has_ranges, int32_t has_bias_gradient,
                                                                     int32_t has_sinks, int32_t has_slopes_gradient,
                                                                     const char** names) {
    using namespace fastattn;
    try {
        const BackwardKernels kernels = backward_kernels(
            compute_capability, shared_bytes, KernelSize(head_dim, value_dim), dtype_of(is_bfloat16),
            {changes_scores != 0, has_ranges != 0}, {has_bias_gradient != 0, has_sinks != 0, has_slopes_gradient != 0});
        int32_t count = 0;
        for (const BackwardKernels::Row* kernel : kernels.in_order()) {
            if (kernel != nullptr) names[count++] = kernel->name();
        }
        return count;
    } catch (const std::exception&) {
        return 0;
    }
}

// Returns the schedule of the key_value kernel of a bf16 call without options, or zeros if this kernel is not one of
// Hopper's. total_keys: the keys of all packed sequences, or -1 for dense tensors.
FASTATTN_ASKED_BY_PYTHON fastattn::BackwardSchedule fastattn_backward_schedule(
    const fastattn::DeviceFacts* facts, int32_t widest, int32_t batch, int32_t heads, int32_t key_heads, int32_t rows,
    int32_t keys, int32_t total_keys, int32_t window_left, int32_t window_right, int32_t is_deterministic) {
    using namespace fastattn;
    try {
        const BackwardKernels kernels = backward_kernels(facts->compute_capability, facts->shared_bytes_per_cta, widest,
                                                         DataType::kBFloat16, {}, {});
        if (kernels.key_value->key.architecture != 90) return {};
        AttentionBackwardParams params{};
        params.query.batch = params.key.batch = batch;
        params.query.heads = heads, params.query.rows = rows, params.query.head_dim = widest;
        params.key.heads = key_heads, params.key.rows = keys;
        params.scores.window_left = window_side(window_left, keys + int64_t{rows});
        params.scores.window_right = window_side(window_right, keys + int64_t{rows});
        const int32_t somewhere = 0;
        if (total_keys >= 0) params.packed.cu_seqlens_k = &somewhere, params.packed.total_k = total_keys;
        const TileFacts& tile = kernels.key_value->tile;
        schedule_key_tiles(params, tile.block_m, tile.block_n, *facts, is_deterministic != 0);
        const RowSplits& splits = params.row_splits;
        return {splits.first_tile,      splits.over_heads, splits.over_rows,
                params.heads_per_group, tile.block_m,      tile.block_n};
    } catch (const std::exception&) {
        return {};
    }
}

// Returns the name of the kernel of flash-decoding. widest: the larger of the call's two head dims. rows: the query
// rows of a KV head.
FASTATTN_ASKED_BY_PYTHON const char* fastattn_decode_kernel(int32_t compute_capability, int32_t shared_bytes,
                                                            int32_t widest, int32_t is_bfloat16, int32_t cache_format,
                                                            int32_t rows) {
    using namespace fastattn;
    return name_or_null([&]() -> auto& {
        return decode_kernel(compute_capability, shared_bytes, widest, dtype_of(is_bfloat16),
                             static_cast<CacheFormat>(cache_format), rows);
    });
}

FASTATTN_ASKED_BY_PYTHON const char* fastattn_append_kernel(int32_t compute_capability, int32_t widest,
                                                            int32_t is_bfloat16, int32_t cache_format) {
    using namespace fastattn;
    return name_or_null([&]() -> auto& {
        return decode_append_kernels(static_cast<CacheFormat>(cache_format))
            .find(compute_capability, widest, dtype_of(is_bfloat16), /*flag=*/false);
    });
}

// Returns the name of the kernel of int8_matmul, of its input gradient, or of int8_matmul with int8 activations (which
// = 0, 1, 2), with sums [M, N] over K. has_groups: scales are per group along K. is_plain: 16-bit input, and no bias,
// activation or residual. sums_tokens: the input gradient comes with the gradient of a bias.
FASTATTN_ASKED_BY_PYTHON const char* fastattn_int8_matmul_kernel(int32_t which, int32_t compute_capability,
                                                                 int32_t num_sms, int32_t is_bfloat16,
                                                                 int32_t has_groups, int32_t is_plain,
                                                                 int32_t sums_tokens, int32_t M, int32_t N, int32_t K) {
    using namespace fastattn;
    const Int8Traits traits{dtype_of(is_bfloat16), has_groups != 0, is_plain != 0, sums_tokens != 0};
    try {
        const Int8Choice chosen = int8_kernel(int8_kernels(which), compute_capability, num_sms, traits, M, N, K);
        return chosen.dequantises ? kDequantisedName : chosen.kernel->name();
    } catch (const std::exception&) {
        return nullptr;
    }
}

FASTATTN_ASKED_BY_PYTHON fastattn::Int8Limits fastattn_int8_limits() {
    return {fastattn::kMostInt8SumK, int64_t{1} << fastattn::kLaunchCountBits};
}

// Returns the predicted times of the two ways between which fastattn_int8_matmul_kernel() chooses.
FASTATTN_ASKED_BY_PYTHON fastattn::Int8Ways fastattn_int8_ways(int32_t which, int32_t compute_capability,
                                                               int32_t num_sms, int32_t is_bfloat16, int32_t has_groups,
                                                               int32_t is_plain, int32_t sums_tokens, int32_t M,
                                                               int32_t N, int32_t K) {
    using namespace fastattn;
    const Int8Traits traits{dtype_of(is_bfloat16), has_groups != 0, is_plain != 0, sums_tokens != 0};
    try {
        const Int8Choice chosen = int8_kernel(int8_kernels(which), compute_capability, num_sms, traits, M, N, K);
        const double per_microsecond = 1e3 * sm_rates(compute_capability).gigahertz;
        return {chosen.kernel->name(), chosen.choice.clocks / per_microsecond,
                chosen.dequantised_clocks / per_microsecond};
    } catch (const std::exception&) {
        return {};
    }
}

// Returns the schedule of the fastest kernel for these sizes; 0 CTAs if no kernel runs.
FASTATTN_ASKED_BY_PYTHON fastattn::LaunchSchedule fastattn_int8_matmul_schedule(int32_t which,
                                                                                int32_t compute_capability,
                                                                                int32_t num_sms, int32_t has_groups,
                                                                                int32_t M, int32_t N, int32_t K) {
    using namespace fastattn;
    try {
        const Int8Traits traits{DataType::kBFloat16, has_groups != 0, /*is_plain=*/false};
        const auto [_, tile, schedule, clocks] =
            int8_kernel(int8_kernels(which), compute_capability, num_sms, traits, M, N, K).choice;
        const int32_t resident = resident_clusters(tile, num_sms);
        const double full_steps =
            steps_of_full_gpu(schedule, matmul_clocks(tile, M, sm_rates(compute_capability), resident), resident);
        if (!tile.uses_wgmma) {
            return {num_ctas(schedule), longest_steps(schedule), tile.block_m, num_workspace_slots(schedule),
                    full_steps};
        }
        const int32_t clusters = num_clusters(schedule, resident);
        return {int64_t{tile.cluster_size} * clusters, longest_steps_of_cluster(schedule, clusters), tile.block_m,
                tile.cluster_size * num_workspace_slots(schedule), full_steps};
    } catch (const std::exception&) {
        return {};
    }
}

// Returns the predicted time of a matmul of 16-bit numbers by cuBLAS, in microseconds.
FASTATTN_ASKED_BY_PYTHON double fastattn_cublas_microseconds(int32_t compute_capability, int32_t num_sms, int32_t M,
                                                             int32_t N, int32_t K) {
    using namespace fastattn;
    const SmRates rates = sm_rates(compute_capability);
    return cublas_clocks(M, N, K, rates, num_sms) / (1e3 * rates.gigahertz);
}

// Restricts all int8 matmuls to kernels of this architecture with tiles of block_m rows, until the next call of this
// function. 0 means any.
FASTATTN_ASKED_BY_PYTHON void fastattn_force_int8_tile(int32_t architecture, int32_t block_m) {
    fastattn::forced_int8_tile().architecture = architecture;
    fastattn::forced_int8_tile().block_m = block_m;
}

// Returns the schedule of flash-decoding for sequences that fill the capacity. rows: the query rows of a KV head.
FASTATTN_ASKED_BY_PYTHON fastattn::LaunchSchedule fastattn_decode_schedule(const fastattn::DeviceFacts* facts,
                                                                           int32_t widest, int32_t cache_format,
                                                                           int32_t batch, int32_t kv_heads,
                                                                           int32_t rows, int32_t capacity) {
    using namespace fastattn;
    TileFacts tile;
    try {
        tile = decode_kernel(facts->compute_capability, facts->shared_bytes_per_cta, widest, DataType::kBFloat16,
                             static_cast<CacheFormat>(cache_format), rows)
                   .tile;
    } catch (const std::exception&) {
        return {};
    }
    const SequenceShape shape{capacity, 0, 1, ScoreParams::kUnbounded};
    const SplitSchedule schedule =
        split_schedule(shape, batch, kv_heads, ceil_div(rows, tile.block_m), tile.block_n,
                       /*num_splits=*/0, /*batch_invariant=*/false, facts->num_sms * tile.ctas_per_sm);
    const TileSplits splits = tile_splits(schedule, cached_sequence(shape, capacity), tile.block_n);
    const int64_t blocks = int64_t{batch} * schedule.tiles_per_sequence * splits.num_splits * splits.blocks_per_split;
    return {schedule.num_ctas, choose_splits_per_cta(schedule, blocks), tile.block_m,
            can_be_split(schedule, shape, tile.block_n) ? num_workspace_slots(schedule) : 0, /*steps_of_full_gpu=*/0};
}
