// Checks the arguments of fastattn::attention_forward, fills the kernel's parameters and launches the kernel.

#include "api/attention_forward.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <limits>

#include "api/attention_arguments.h"
#include "api/device.h"
#include "api/kernel_choice.h"
#include "api/outside_rows.h"
#include "api/scores.h"
#include "api/workspace.h"
#include "attention/forward.h"
#include "host/device_facts.h"
#include "scheduler/key_splits.h"
#include "scheduler/work_tile.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "attention_forward";
constexpr double kLog2E = 1.4426950408889634;

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias, std::optional<Tensor> alibi_slopes,
    std::optional<Tensor> sinks, std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q,
    std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left,
    int64_t window_right, std::optional<int64_t> first_row, int64_t first_key, int64_t first_head, double softcap,
    double dropout_p, std::optional<Tensor> block_table, bool batch_invariant, bool return_max_logit, bool exact_out,
    std::optional<Tensor> key_ranges) {
    if (block_table) check_absent(kOp, "key_ranges", key_ranges);
    const AttentionSizes sizes =
        check_attention(kOp, query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        attention_forward_options_kernels().largest_head_dim(), block_table);
    Tensor out = empty_like_heads(query, sizes.value_dim, exact_out ? ScalarType::Float : query.scalar_type());
    Tensor lse = empty_rows(query);
    Tensor max_logit = torch::stable::new_empty(query, {return_max_logit ? query.size(1) : 0}, ScalarType::Float);
    if (return_max_logit) torch::stable::fill_(max_logit, -std::numeric_limits<double>::infinity());
    if (lse.numel() == 0) return {out, lse, max_logit};

    const Tensor aligned_query = aligned(query), aligned_key = aligned(key), aligned_value = aligned(value);
    AttentionForwardParams attention{};
    attention.query = heads_view<const uint16_t>(kOp, "query", aligned_query, sizes.query_sequences());
    const Sequences key_sequences =
        block_table ? Sequences{/*are_packed=*/false, key.size(0), sizes.keys} : sizes.key_sequences();
    attention.key = heads_view<const uint16_t>(kOp, "key", aligned_key, key_sequences);
    attention.value = heads_view<const uint16_t>(kOp, "value", aligned_value, key_sequences);
    if (exact_out) {
        attention.exact_out = heads_view<float>(kOp, "out", out, sizes.query_sequences());
        attention.out.head_dim = attention.exact_out.head_dim;
    } else {
        attention.out = heads_view<uint16_t>(kOp, "out", out, sizes.query_sequences());
    }
    attention.lse = rows_view(lse, attention.query);
    if (return_max_logit) attention.max_logits = static_cast<float*>(max_logit.data_ptr());
    attention.packed = packed_params(kOp, query, key, cu_seqlens_q, cu_seqlens_k);
    if (block_table) attention.paged = paged_params(kOp, key, value, block_table);

    const ScoreOptions options{bias,         alibi_slopes, sinks,     dropout_seed, key_ranges, scale,    window_left,
                               window_right, first_row,    first_key, first_head,   softcap,    dropout_p};
    const OnDeviceOf device(query);
    const DeviceFacts facts = device_facts();
    attention.heads_per_group = heads_per_group(attention.query, attention.key, facts.l2_bytes);
    ScoreTensors tensors;
    attention.scores = score_params(kOp, options, query, sizes, tensors);
    attention.scale_log2 = scale == 0 ? 1.0f : static_cast<float>(std::abs(scale) * kLog2E);
    const ForwardTraits traits{options.change_scores(), block_table.has_value()};
    const KernelSize head_dims(static_cast<int32_t>(sizes.head_dim), static_cast<int32_t>(sizes.value_dim));
    if (sizes.is_packed) {
        const auto fill = [&](const auto& out_view) {
            fill_outside_rows({to_zero_outside(out_view, attention.packed.cu_seqlens_q, attention.packed.total_q)},
                              attention.lse, facts, device.stream());
        };
        exact_out ? fill(attention.exact_out) : fill(attention.out);
    }
    auto& kernel = forward_kernel(facts.compute_capability, facts.shared_bytes_per_cta, head_dims, sizes.dtype, traits);
    std::optional<Tensor> seen_tiles;
    if (key_ranges) {
        const int32_t num_key_tiles = ceil_div(attention.key.rows, kernel.tile.block_n);
        seen_tiles = make_seen_tiles(attention.seen_tiles, attention.scores.ranges, query, sizes, kernel.tile,
                                     num_key_tiles, /*pitch=*/2 + num_key_tiles);
        attention_key_ranges_kernels()
            .find(facts.compute_capability, 0, std::nullopt, false)
            .launch(attention, device.stream());
    }
    // CTAs may split the keys of a tile (scheduler/key_splits.h), except with key_ranges: the host cannot tell from
    // positions how many keys the ranges let a tile see.
    std::optional<Tensor> workspace;
    const int64_t num_ctas = int64_t{facts.num_sms} * kernel.tile.ctas_per_sm;
    const int64_t rows_of_workspace = workspace_rows(attention, kernel.tile.block_m, kernel.tile.block_n, num_ctas);
    if (rows_of_workspace > 0 && !batch_invariant && !key_ranges) {
        workspace = make_partial_workspace(attention.partials, query, rows_of_workspace, sizes.value_dim,
                                           num_ctas * kMostSlotsPerCta * kCombineRounds);
        attention.resident_ctas = static_cast<int32_t>(num_ctas);
    }
    std::optional<Tensor> counter;
    if (kernel.key.architecture == 90 && !workspace && claiming_pays(attention, kernel.tile.block_m, num_ctas)) {
        counter = make_workspace(query, [&](WorkspaceArena& arena) { attention.claimed = arena.take<uint64_t>(1); });
        attention.launch_id = launch_id();
    }
    kernel.launch(attention, device.stream());
    return {out, lse, max_logit};
}

}  // namespace fastattn
