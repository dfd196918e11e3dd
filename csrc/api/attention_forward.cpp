// fastattn::attention_forward: check, fill the params, pick the kernel.

#ifdef FASTATTN_ARCH_80

#include "api/attention_forward.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "api/checks.h"
#include "api/device.h"
#include "api/scores.h"
#include "attention/forward.h"
#include "attention/tile_order.h"
#include "attention/tiles_sm80.h"
#include "host/dispatch.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "attention_forward";

using DataTypes = std::integer_sequence<DataType, DataType::kFloat16, DataType::kBFloat16>;

// In the memory order of query: [B, Sq, Hq, Dv] if its heads lie closer together than its rows, else contiguous.
Tensor empty_out(const Tensor& query, int64_t head_dim) {
    const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
    if (query.stride(1) >= query.stride(2)) return torch::stable::new_empty(query, {batch, heads, rows, head_dim});
    return torch::stable::transpose(torch::stable::new_empty(query, {batch, rows, heads, head_dim}), 1, 2);
}

void check_heads(const Tensor& query, const Tensor& key) {
    const int64_t heads = query.size(1), kv_heads = key.size(1);
    check(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, kOp,
          "the heads of query must be a multiple of the heads of key, got ", heads, " and ", kv_heads);
}

void check_dense(const Tensor& query, const Tensor& key, const Tensor& value) {
    check_rank(kOp, "query", query, 4);
    check_rank(kOp, "key", key, 4);
    check_rank(kOp, "value", value, 4);
    check_shape(kOp, "key", key, {query.size(0), key.size(1), key.size(2), query.size(3)});
    check_shape(kOp, "value", value, {key.size(0), key.size(1), key.size(2), value.size(3)});
}

// [total, heads, head_dim]; `cu_seqlens` int32 [batch + 1].
void check_packed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                  const Tensor& cu_seqlens_k, const std::optional<Tensor>& bias) {
    check_rank(kOp, "query", query, 3);
    check_rank(kOp, "key", key, 3);
    check_rank(kOp, "value", value, 3);
    check_shape(kOp, "key", key, {key.size(0), key.size(1), query.size(2)});
    check_shape(kOp, "value", value, {key.size(0), key.size(1), value.size(2)});
    check_absent(kOp, "bias", bias);
    check_rank(kOp, "cu_seqlens_q", cu_seqlens_q, 1);
    check(cu_seqlens_q.size(0) > 0, kOp, "cu_seqlens_q must have at least 1 element");
    check_shape(kOp, "cu_seqlens_k", cu_seqlens_k, {cu_seqlens_q.size(0)});
    for (const auto& [name, tensor] : {std::pair{"cu_seqlens_q", cu_seqlens_q}, {"cu_seqlens_k", cu_seqlens_k}}) {
        check(tensor.scalar_type() == ScalarType::Int, kOp, name, " must be int32, got ", dtype_text(tensor));
        check_device(kOp, name, tensor, query);
    }
}

RowsView rows_view(const Tensor& lse, const HeadsView<const uint16_t>& query, bool is_packed) {
    return {static_cast<float*>(lse.data_ptr()), query.batch, query.heads, query.rows, is_packed ? 0 : lse.stride(0),
            lse.stride(is_packed ? 0 : 1)};
}

void launch_plain(const AttentionForwardParams& params, DataType dtype, bool causal, Stream stream) {
    dispatch_value(ForwardHeadDims{}, params.query.head_dim, [&](auto head_dim) {
        dispatch_value(DataTypes{}, dtype, [&](auto data_type) {
            dispatch_bool(causal, [&](auto is_causal) {
                launch_attention_forward_sm80<head_dim.value, data_type.value, is_causal.value>(params, stream);
            });
        });
    });
}

void launch_with_options(const AttentionOptionsParams& params, DataType dtype, Stream stream) {
    const int32_t widest = std::max(params.attention.query.head_dim, params.attention.value.head_dim);
    dispatch_at_least(ForwardOptionsHeadDims{}, widest, [&](auto head_dim) {
        dispatch_value(DataTypes{}, dtype, [&](auto data_type) {
            launch_attention_forward_options_sm80<head_dim.value, data_type.value>(params, stream);
        });
    });
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias,
                                             std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                             std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q,
                                             std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q,
                                             int64_t max_seqlen_k, double scale, int64_t window_left,
                                             int64_t window_right, bool top_left, double softcap, double dropout_p) {
    const bool is_packed = cu_seqlens_q.has_value();
    check(is_packed == cu_seqlens_k.has_value(), kOp, "cu_seqlens_q and cu_seqlens_k must both be given, or neither");
    if (is_packed) {
        check_packed(query, key, value, *cu_seqlens_q, *cu_seqlens_k, bias);
        cu_seqlens_q = torch::stable::contiguous(*cu_seqlens_q);
        cu_seqlens_k = torch::stable::contiguous(*cu_seqlens_k);
    } else {
        check_dense(query, key, value);
    }
    check_like(kOp, "key", key, query);
    check_like(kOp, "value", value, query);
    check_heads(query, key);
    const DataType dtype = data_type(kOp, "query", query);
    for (const auto& [name, tensor] : {std::pair{"query", query}, {"value", value}}) {
        const int64_t head_dim = tensor.size(tensor.dim() - 1);
        check(head_dim > 0 && head_dim % 8 == 0 && head_dim <= largest(ForwardOptionsHeadDims{}), kOp, name,
              " must have a head dim that is a multiple of 8 up to ", largest(ForwardOptionsHeadDims{}), ", got ",
              head_dim);
    }

    const int64_t value_dim = value.size(value.dim() - 1);
    Tensor out = is_packed ? torch::stable::new_empty(query, {query.size(0), query.size(1), value_dim})
                           : empty_out(query, value_dim);
    Tensor lse =
        is_packed ? torch::stable::new_empty(query, {query.size(1), query.size(0)}, ScalarType::Float)
                  : torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
    if (is_packed) {  // rows that belong to no sequence
        torch::stable::zero_(out);
        torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    if (lse.numel() == 0) return {out, lse};

    const Tensor aligned_query = aligned(query), aligned_key = aligned(key), aligned_value = aligned(value);
    AttentionOptionsParams params{};
    AttentionForwardParams& attention = params.attention;
    if (is_packed) {
        const int64_t batch = cu_seqlens_q->size(0) - 1;
        const int64_t rows = std::min(max_seqlen_q, query.size(0)), keys = std::min(max_seqlen_k, key.size(0));
        attention.query = packed_view<const uint16_t>(kOp, "query", aligned_query, batch, rows);
        attention.key = packed_view<const uint16_t>(kOp, "key", aligned_key, batch, keys);
        attention.value = packed_view<const uint16_t>(kOp, "value", aligned_value, batch, keys);
        attention.out = packed_view<uint16_t>(kOp, "out", out, batch, rows);
        params.packed = {static_cast<const int32_t*>(cu_seqlens_q->data_ptr()),
                         static_cast<const int32_t*>(cu_seqlens_k->data_ptr()), to_int32(kOp, "query", query.size(0)),
                         to_int32(kOp, "key", key.size(0))};
    } else {
        attention.query = heads_view<const uint16_t>(kOp, "query", aligned_query);
        attention.key = heads_view<const uint16_t>(kOp, "key", aligned_key);
        attention.value = heads_view<const uint16_t>(kOp, "value", aligned_value);
        attention.out = heads_view<uint16_t>(kOp, "out", out);
    }
    attention.lse = rows_view(lse, attention.query, is_packed);
    attention.heads_per_group = heads_per_group(attention.query, attention.key);

    const ScoreOptions options{bias,        alibi_slopes, sinks,    dropout_seed, scale,
                               window_left, window_right, top_left, softcap,      dropout_p};
    const OnDeviceOf device(query);
    const bool has_plain_kernel =
        attention.query.head_dim == attention.value.head_dim && contains(ForwardHeadDims{}, attention.query.head_dim);
    if (options.are_plain() && !is_packed && has_plain_kernel) {
        attention.scale = static_cast<float>(scale);
        attention.causal_offset = top_left ? 0 : attention.key.rows - attention.query.rows;
        launch_plain(attention, dtype, window_right == 0, device.stream());
    } else {
        ScoreTensors kept;
        params.scores = score_params(kOp, options, query, attention.query.batch, attention.query.heads,
                                     attention.query.rows, attention.key.rows, kept);
        launch_with_options(params, dtype, device.stream());
    }
    return {out, lse};
}

}  // namespace fastattn

#endif  // FASTATTN_ARCH_80
