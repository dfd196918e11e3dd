// Checks the arguments of fastattn::attention_decode, fills the kernel's parameters and launches the kernel.

#include "api/decode.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "api/attention_arguments.h"
#include "api/cache_arguments.h"
#include "api/checks.h"
#include "api/device.h"
#include "api/kernel_choice.h"
#include "api/scores.h"
#include "api/workspace.h"
#include "decode/decode.h"
#include "host/device_facts.h"
#include "scheduler/decode_splits.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "attention_decode";

CacheFormat check_caches(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                         const std::optional<Tensor>& block_table) {
    check_rank(kOp, "query", query, 4);
    check_rank(kOp, "k_cache", k_cache, 4);
    check_rank(kOp, "v_cache", v_cache, 4);
    const int64_t blocks = block_table ? k_cache.size(0) : query.size(0), heads = query.size(1);
    const int64_t kv_heads = k_cache.size(1);
    check_shape(kOp, "k_cache", k_cache, {blocks, kv_heads, k_cache.size(2), query.size(3)});
    check_shape(kOp, "v_cache", v_cache, {blocks, kv_heads, k_cache.size(2), v_cache.size(3)});
    check(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, kOp,
          "query must have a multiple of the heads of k_cache (dim 1 of both), got ", heads, " and ", kv_heads);
    const int32_t most_dims = decode_split_kernels(CacheFormat::k16Bit).largest_head_dim();
    check_head_dim(kOp, "query", query, most_dims);
    check_head_dim(kOp, "v_cache", v_cache, most_dims);
    const CacheFormat format = check_written(kOp, k_cache, v_cache, "query", query);
    if (!block_table) return format;
    check_rank(kOp, "block_table", *block_table, 2);
    check_shape(kOp, "block_table", *block_table, {query.size(0), block_table->size(1)});
    check_int32(kOp, "block_table", *block_table, query);
    return format;
}

void check_new(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& k_new,
               const std::optional<Tensor>& v_new) {
    check(k_new.has_value() == v_new.has_value(), kOp, "k_new and v_new must both be given, or neither");
    if (!k_new) return;
    check_rank(kOp, "k_new", *k_new, 4);
    const int64_t batch = query.size(0), kv_heads = k_cache.size(1), rows = k_new->size(2);
    check_shape(kOp, "k_new", *k_new, {batch, kv_heads, rows, k_cache.size(3)});
    check_shape(kOp, "v_new", *v_new, {batch, kv_heads, rows, v_cache.size(3)});
    check_like(kOp, "k_new", *k_new, query);
    check_like(kOp, "v_new", *v_new, query);
}

RotaryParams::Kind rotary_kind(const Tensor& cos) {
    switch (cos.scalar_type()) {
        case ScalarType::Half:
            return RotaryParams::Kind::kFloat16;
        case ScalarType::BFloat16:
            return RotaryParams::Kind::kBFloat16;
        case ScalarType::Float:
            return RotaryParams::Kind::kFloat32;
        case ScalarType::Double:
            return RotaryParams::Kind::kFloat64;
        default:
            check(false, kOp, "rotary_cos must be float16, bfloat16, float32 or float64, got ", dtype_text(cos));
            return RotaryParams::Kind::kNone;
    }
}

// Checks cos and sin and returns their parameters. Makes both contiguous in place, because the parameters point into
// them.
RotaryParams rotary_params(const Tensor& query, std::optional<Tensor>& cos, std::optional<Tensor>& sin,
                           bool interleaved) {
    check(cos.has_value() == sin.has_value(), kOp, "rotary_cos and rotary_sin must both be given, or neither");
    if (!cos || cos->numel() == 0) return {};
    check_rank(kOp, "rotary_cos", *cos, 2);
    const int64_t positions = cos->size(0), half_dim = cos->size(1);
    check_shape(kOp, "rotary_sin", *sin, {positions, half_dim});
    check(sin->scalar_type() == cos->scalar_type(), kOp, "rotary_sin must have the dtype of rotary_cos, ",
          dtype_text(*cos), ", got ", dtype_text(*sin));
    check(2 * half_dim <= query.size(3), kOp,
          "rotary_cos must have at most as many columns as half of query's head dim, ", query.size(3) / 2, ", got ",
          half_dim);
    check_device(kOp, "rotary_cos", *cos, query);
    check_device(kOp, "rotary_sin", *sin, query);
    cos = torch::stable::contiguous(*cos);
    sin = torch::stable::contiguous(*sin);
    return {cos->data_ptr(),
            sin->data_ptr(),
            rotary_kind(*cos),
            to_int32(kOp, "rotary_cos", positions),
            static_cast<int32_t>(half_dim),
            interleaved};
}

// Checks `tree_mask` and returns its view. In a tree, a token's index in the sequence is not its position. Options that
// use the index as the position are refused.
TreeMaskView tree_mask_view(const Tensor& query, const std::optional<Tensor>& tree_mask, const ScoreParams& scores,
                            const RotaryParams& rotary) {
    if (!tree_mask) return {};
    check(tree_mask->scalar_type() == ScalarType::Bool, kOp, "tree_mask must be bool, got ", dtype_text(*tree_mask));
    check_rank(kOp, "tree_mask", *tree_mask, 3);
    check_shape(kOp, "tree_mask", *tree_mask, {query.size(0), query.size(2), query.size(2)});
    check_device(kOp, "tree_mask", *tree_mask, query);
    check(!scores.has_window() && scores.alibi_slopes == nullptr && rotary.kind == RotaryParams::Kind::kNone, kOp,
          "tree_mask cannot be combined with a window, alibi_slopes or rotary_cos: in a tree, a token's index is not "
          "its position");
    return {static_cast<const uint8_t*>(tree_mask->data_ptr()), tree_mask->stride(0), tree_mask->stride(1),
            tree_mask->stride(2)};
}

void check_out(const Tensor& out, const Tensor& query, int64_t value_dim) {
    check_shape(kOp, "out", out, {query.size(0), query.size(1), query.size(2), value_dim});
    check_like(kOp, "out", out, query);
    check(out.numel() == 0 || is_aligned(out), kOp, "out is written in place: ", kAlignedRule);
}

}  // namespace

Tensor attention_decode_out(Tensor query, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens,
                            std::optional<Tensor> k_new, std::optional<Tensor> v_new, std::optional<Tensor> rotary_cos,
                            std::optional<Tensor> rotary_sin, bool rotary_interleaved,
                            std::optional<Tensor> block_table, std::optional<Tensor> k_scale,
                            std::optional<Tensor> v_scale, std::optional<Tensor> alibi_slopes,
                            std::optional<Tensor> sinks, double scale, int64_t window_left, int64_t window_right,
                            double softcap, int64_t num_splits, bool batch_invariant, std::optional<Tensor> tree_mask,
                            Tensor out) {
    const CacheFormat format = check_caches(query, k_cache, v_cache, block_table);
    check_new(query, k_cache, v_cache, k_new, v_new);
    check_scales(kOp, "k_scale", k_scale, k_cache);
    check_scales(kOp, "v_scale", v_scale, v_cache);
    const DataType dtype = data_type(kOp, "query", query);
    const int64_t batch = query.size(0), heads = query.size(1), num_queries = query.size(2);
    const int64_t kv_heads = k_cache.size(1);
    const int64_t head_dim = k_cache.size(3), value_dim = v_cache.size(3);
    check_shape(kOp, "cache_seqlens", cache_seqlens, {batch});
    check_int32(kOp, "cache_seqlens", cache_seqlens, query);
    check(num_splits >= 0, kOp, "num_splits must be at least 0, got ", num_splits);
    const int32_t capacity = checked_capacity(kOp, k_cache, block_table);
    const int64_t num_new = k_new ? k_new->size(2) : 0;
    check(num_queries < kMostTokens && num_new < kMostTokens, kOp, "query and k_new must have fewer than 2^30 rows");

    DecodeParams params{};
    params.rotary = rotary_params(query, rotary_cos, rotary_sin, rotary_interleaved);
    const ScoreOptions options{std::nullopt,
                               alibi_slopes,
                               sinks,
                               std::nullopt,
                               std::nullopt,
                               scale,
                               window_left,
                               window_right,
                               std::nullopt,
                               0,
                               0,
                               softcap,
                               0.0};
    ScoreTensors score_tensors;
    const AttentionSizes sizes{dtype, /*is_packed=*/false, batch, heads, num_queries, capacity, head_dim, value_dim};
    params.scores = score_params(kOp, options, query, sizes, score_tensors);

    params.tree_mask = tree_mask_view(query, tree_mask, params.scores, params.rotary);
    check_out(out, query, value_dim);
    const Tensor lse = empty_rows(query);
    const bool appends = num_new > 0 && batch * kv_heads * capacity > 0;
    if (lse.numel() == 0 && !appends) return lse;

    const Tensor aligned_query = aligned(query), lengths = torch::stable::contiguous(cache_seqlens);
    params.query = heads_view<const uint16_t>(kOp, "query", aligned_query, sizes.query_sequences());
    params.out = heads_view<uint16_t>(kOp, "out", out, sizes.query_sequences());
    params.lse = rows_view(lse, params.query);
    params.k_cache = cache_view(kOp, "k_cache", k_cache, "k_scale", k_scale);
    params.v_cache = cache_view(kOp, "v_cache", v_cache, "v_scale", v_scale);
    params.layout = cache_layout(kOp, k_cache, block_table);
    params.cache_seqlens = static_cast<const int32_t*>(lengths.data_ptr());
    std::optional<Tensor> aligned_k_new, aligned_v_new;
    if (appends) {
        aligned_k_new = aligned(*k_new);
        aligned_v_new = aligned(*v_new);
        const Sequences new_sequences{/*are_packed=*/false, batch, num_new};
        params.k_new = heads_view<const uint16_t>(kOp, "k_new", *aligned_k_new, new_sequences);
        params.v_new = heads_view<const uint16_t>(kOp, "v_new", *aligned_v_new, new_sequences);
    }
    const OnDeviceOf device(query);
    const DeviceFacts facts = device_facts();
    params.kv_heads = to_int32(kOp, "k_cache", kv_heads);
    params.group = kv_heads > 0 ? params.query.heads / params.kv_heads : 0;
    const int32_t rows = to_int32(kOp, "query", num_queries * params.group);
    auto& kernel =
        decode_kernel(facts.compute_capability, facts.shared_bytes_per_cta, sizes.widest(), dtype, format, rows);
    params.row_tiles = std::max(1, ceil_div(rows, kernel.tile.block_m));
    params.by_group = Divisor::of(std::max(params.group, 1));
    params.by_row_tiles = Divisor::of(params.row_tiles);
    params.sequence = {capacity, appends ? params.k_new.rows : 0, params.query.rows, params.scores.window_left};

    const int32_t block_keys = kernel.tile.block_n;
    params.schedule = split_schedule(params.sequence, params.query.batch, params.kv_heads, params.row_tiles, block_keys,
                                     num_splits, batch_invariant, facts.num_sms * kernel.tile.ctas_per_sm);
    std::optional<Tensor> workspace;
    if (lse.numel() > 0 && can_be_split(params.schedule, params.sequence, block_keys)) {
        workspace =
            make_partial_workspace(params.partials, query, num_workspace_slots(params.schedule) * kernel.tile.block_m,
                                   value_dim, num_counters(params.schedule));
    }
    kernel.launch(params, device.stream());
    return lse;
}

std::tuple<Tensor, Tensor> attention_decode(Tensor query, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens,
                                            std::optional<Tensor> k_new, std::optional<Tensor> v_new,
                                            std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin,
                                            bool rotary_interleaved, std::optional<Tensor> block_table,
                                            std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                                            std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                            double scale, int64_t window_left, int64_t window_right, double softcap,
                                            int64_t num_splits, bool batch_invariant, std::optional<Tensor> tree_mask) {
    check_rank(kOp, "query", query, 4);
    check_rank(kOp, "v_cache", v_cache, 4);
    const Tensor out = empty_like_heads(query, v_cache.size(3));
    const Tensor lse =
        attention_decode_out(query, k_cache, v_cache, cache_seqlens, k_new, v_new, rotary_cos, rotary_sin,
                             rotary_interleaved, block_table, k_scale, v_scale, alibi_slopes, sinks, scale, window_left,
                             window_right, softcap, num_splits, batch_invariant, tree_mask, out);
    return {out, lse};
}

std::tuple<Tensor, Tensor> attention_split_keys(Tensor query, Tensor key, Tensor value,
                                                std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                                double scale, int64_t window_left, int64_t window_right,
                                                double softcap) {
    const Tensor lengths = torch::stable::new_empty(query, {key.size(0)}, ScalarType::Int);
    torch::stable::fill_(lengths, static_cast<double>(key.size(2)));
    return attention_decode(query, aligned(key), aligned(value), lengths, std::nullopt, std::nullopt, std::nullopt,
                            std::nullopt, /*rotary_interleaved=*/false, std::nullopt, std::nullopt, std::nullopt,
                            alibi_slopes, sinks, scale, window_left, window_right, softcap, /*num_splits=*/0,
                            /*batch_invariant=*/false, /*tree_mask=*/std::nullopt);
}

}  // namespace fastattn
