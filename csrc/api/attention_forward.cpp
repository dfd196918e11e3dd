// fastattn::attention_forward: check, fill the params, pick the kernel.

#ifdef FASTATTN_ARCH_80

#include "api/attention_forward.h"

#include <torch/csrc/stable/ops.h>

#include <utility>

#include "api/checks.h"
#include "api/device.h"
#include "attention/forward.h"
#include "attention/tile_order.h"
#include "attention/tiles_sm80.h"
#include "host/dispatch.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "attention_forward";

using DataTypes = std::integer_sequence<DataType, DataType::kFloat16, DataType::kBFloat16>;

// In the memory order of query: [B, Sq, Hq, D] if its heads lie closer together than its rows, else contiguous.
Tensor empty_out(const Tensor& query) {
    const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2), head_dim = query.size(3);
    if (query.stride(1) >= query.stride(2)) return torch::stable::new_empty(query, {batch, heads, rows, head_dim});
    return torch::stable::transpose(torch::stable::new_empty(query, {batch, rows, heads, head_dim}), 1, 2);
}

void check_shapes(const Tensor& query, const Tensor& key, const Tensor& value) {
    check_rank(kOp, "query", query, 4);
    check_rank(kOp, "key", key, 4);
    check_like(kOp, "key", key, query);
    check_like(kOp, "value", value, query);
    check_shape(kOp, "key", key, {query.size(0), key.size(1), key.size(2), query.size(3)});
    check_shape(kOp, "value", value, {key.size(0), key.size(1), key.size(2), key.size(3)});
    const int64_t heads = query.size(1), kv_heads = key.size(1);
    check(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, kOp,
          "the heads of query must be a multiple of the heads of key, got ", heads, " and ", kv_heads);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias,
                                             std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                             std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q,
                                             std::optional<Tensor> cu_seqlens_k, int64_t /*max_seqlen_q*/,
                                             int64_t /*max_seqlen_k*/, double scale, int64_t window_left,
                                             int64_t window_right, bool top_left, double softcap, double dropout_p) {
    check_absent(kOp, "bias", bias);
    check_absent(kOp, "alibi_slopes", alibi_slopes);
    check_absent(kOp, "sinks", sinks);
    check_absent(kOp, "dropout_seed", dropout_seed);
    check_absent(kOp, "cu_seqlens_q", cu_seqlens_q);
    check_absent(kOp, "cu_seqlens_k", cu_seqlens_k);
    check(softcap <= 0, kOp, "softcap must be 0 for the native kernel, got ", softcap);
    check(dropout_p == 0, kOp, "dropout_p must be 0 for the native kernel, got ", dropout_p);
    check(window_left < 0, kOp, "window_left must be unbounded (negative) for the native kernel, got ", window_left);
    check(window_right <= 0, kOp, "window_right must be 0 (causal) or unbounded (negative) for the native kernel, got ",
          window_right);
    check_shapes(query, key, value);
    const DataType dtype = data_type(kOp, "query", query);
    const bool causal = window_right == 0;

    Tensor out = empty_out(query);
    Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
    if (lse.numel() == 0) return {out, lse};

    const Tensor aligned_query = aligned(query), aligned_key = aligned(key), aligned_value = aligned(value);
    AttentionForwardParams params;
    params.query = heads_view<const uint16_t>(kOp, "query", aligned_query);
    params.key = heads_view<const uint16_t>(kOp, "key", aligned_key);
    params.value = heads_view<const uint16_t>(kOp, "value", aligned_value);
    params.out = heads_view<uint16_t>(kOp, "out", out);
    params.lse = {static_cast<float*>(lse.data_ptr()), params.query.batch, params.query.heads, params.query.rows};
    params.scale = static_cast<float>(scale);
    params.causal_offset = top_left ? 0 : params.key.rows - params.query.rows;
    params.heads_per_group = heads_per_group(params.query, params.key);

    const OnDeviceOf device(query);
    const bool known = dispatch_value(ForwardHeadDims{}, params.query.head_dim, [&](auto head_dim) {
        dispatch_value(DataTypes{}, dtype, [&](auto data_type) {
            dispatch_bool(causal, [&](auto is_causal) {
                launch_attention_forward_sm80<head_dim.value, data_type.value, is_causal.value>(params,
                                                                                                device.stream());
            });
        });
    });
    check(known, kOp, "query must have a head dim that native kernels are built for (", list_text(ForwardHeadDims{}),
          "), got ", params.query.head_dim);
    return {out, lse};
}

}  // namespace fastattn

#endif  // FASTATTN_ARCH_80
