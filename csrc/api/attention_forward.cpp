// fastattn::attention_forward: check, fill the params, pick the kernel.

#ifdef FASTATTN_ARCH_80

#include "api/attention_forward.h"

#include <torch/csrc/stable/ops.h>

#include <limits>
#include <utility>

#include "api/attention_arguments.h"
#include "api/device.h"
#include "api/kernel_choice.h"
#include "api/scores.h"
#include "attention/forward.h"
#include "attention/tile_order.h"
#include "host/device_facts.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "attention_forward";

ForwardTraits traits_of(const ScoreOptions& options, bool is_packed, bool is_paged) {
    return {options.window_right == 0,
            options.window_left >= 0 || options.window_right > 0,
            options.change_scores(),
            options.sinks.has_value(),
            is_packed,
            is_paged};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias,
                                             std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                             std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q,
                                             std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q,
                                             int64_t max_seqlen_k, double scale, int64_t window_left,
                                             int64_t window_right, bool top_left, double softcap, double dropout_p,
                                             std::optional<Tensor> block_table) {
    const AttentionSizes sizes =
        check_attention(kOp, query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        attention_forward_options_kernels().largest_size(), block_table);
    Tensor out = empty_like_heads(query, sizes.value_dim), lse = empty_rows(query);
    if (sizes.is_packed) {  // rows that belong to no sequence
        torch::stable::zero_(out);
        torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    if (lse.numel() == 0) return {out, lse};

    const Tensor aligned_query = aligned(query), aligned_key = aligned(key), aligned_value = aligned(value);
    AttentionOptionsParams params{};
    AttentionForwardParams& attention = params.attention;
    attention.query = heads_view<const uint16_t>(kOp, "query", aligned_query, sizes.query_sequences());
    const Sequences key_sequences =
        block_table ? Sequences{/*are_packed=*/false, key.size(0), sizes.keys} : sizes.key_sequences();
    attention.key = heads_view<const uint16_t>(kOp, "key", aligned_key, key_sequences);
    attention.value = heads_view<const uint16_t>(kOp, "value", aligned_value, key_sequences);
    attention.out = heads_view<uint16_t>(kOp, "out", out, sizes.query_sequences());
    attention.lse = rows_view(lse, attention.query);
    params.packed = packed_params(kOp, query, key, cu_seqlens_q, cu_seqlens_k);
    if (block_table) params.paged = paged_params(kOp, key, value, block_table);

    const ScoreOptions options{bias,        alibi_slopes, sinks,    dropout_seed, scale,
                               window_left, window_right, top_left, softcap,      dropout_p};
    const OnDeviceOf device(query);
    const DeviceFacts facts = device_facts();
    attention.heads_per_group = heads_per_group(attention.query, attention.key, facts.l2_bytes);
    const ForwardTraits traits = traits_of(options, sizes.is_packed, block_table.has_value());
    if (is_plain(traits)) {
        attention.scale = static_cast<float>(scale);
        attention.causal_offset = top_left ? 0 : attention.key.rows - attention.query.rows;
        plain_forward_kernel(facts.compute_capability, sizes.widest(), sizes.dtype, traits)
            .launch(attention, device.stream());
    } else {
        ScoreTensors kept;
        params.scores = score_params(kOp, options, query, sizes, kept);
        options_forward_kernel(facts.compute_capability, sizes.widest(), sizes.dtype, traits)
            .launch(params, device.stream());
    }
    return {out, lse};
}

}  // namespace fastattn

#endif  // FASTATTN_ARCH_80
