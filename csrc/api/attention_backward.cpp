// Checks the arguments of fastattn::attention_backward(_add), allocates gradients and workspace, and launches the
// kernels in order.

#include "api/attention_backward.h"

#include <torch/csrc/stable/ops.h>

#include <type_traits>

#include "api/attention_arguments.h"
#include "api/device.h"
#include "api/kernel_choice.h"
#include "api/outside_rows.h"
#include "api/scores.h"
#include "api/workspace.h"
#include "attention/backward.h"
#include "attention/query_sums.h"
#include "host/device_facts.h"
#include "scheduler/choose_row_splits.h"
#include "scheduler/work_tile.h"

namespace fastattn {
namespace {

constexpr const char *kOp = "attention_backward", *kAddOp = "attention_backward_add";

// Checks that a tensor has the dtype, the device and, except for the head dim, the shape of query.
void check_like_query(const char* name, const Tensor& tensor, const Tensor& query, int64_t head_dim) {
    if (query.dim() == 3) {
        check_shape(kOp, name, tensor, {query.size(0), query.size(1), head_dim});
    } else {
        check_shape(kOp, name, tensor, {query.size(0), query.size(1), query.size(2), head_dim});
    }
    check_like(kOp, name, tensor, query);
}

// Checks lse or its gradient, and returns it contiguous.
Tensor checked_rows(const char* name, const Tensor& tensor, const Tensor& query) {
    if (query.dim() == 3) {
        check_shape(kOp, name, tensor, {query.size(1), query.size(0)});
    } else {
        check_shape(kOp, name, tensor, {query.size(0), query.size(1), query.size(2)});
    }
    return float_tensor(kOp, name, tensor, query);
}

bool is_additive(const BiasView& bias) {
    return bias.kind != BiasView::Kind::kNone && bias.kind != BiasView::Kind::kBool;
}

struct Gradients {
    Tensor query, key, value, bias, sinks, slopes;

    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
        return {query, key, value, bias, sinks, slopes};
    }
};

// Allocates an fp32 gradient in the shape of `of`, or [0] without `of`.
Tensor empty_float_gradient(const std::optional<Tensor>& of, const Tensor& query) {
    if (!of) return torch::stable::new_empty(query, {0}, ScalarType::Float);
    return torch::stable::new_empty(query, of->sizes(), ScalarType::Float);
}

BiasGradientView bias_gradient_view(const Tensor& gradient) {
    BiasGradientView view{};
    view.data = static_cast<float*>(gradient.data_ptr());
    view.batch = to_int32(kOp, "bias", gradient.size(0));
    view.heads = to_int32(kOp, "bias", gradient.size(1));
    view.rows = to_int32(kOp, "bias", gradient.size(2));
    view.keys = to_int32(kOp, "bias", gradient.size(3));
    view.batch_stride = gradient.stride(0);
    view.head_stride = gradient.stride(1);
    view.row_stride = gradient.stride(2);
    view.key_stride = gradient.stride(3);
    return view;
}

// Allocates the workspace in which kernels leave results for later kernels. It must live until all kernels are
// launched. Its size is O(tokens): up to six numbers for each query row, one for every kSlopesBlockM rows, dQ in fp32
// in tiles of block_m rows, and dK and dV in fp32 of those tiles of keys that are split.
Tensor make_backward_workspace(AttentionBackwardParams& params, const Tensor& query, const AttentionSizes& sizes,
                               const BackwardKernels::Row& kernel, bool deterministic) {
    const int32_t block_m = kernel.tile.block_m, block_n = kernel.tile.block_n;
    const int32_t head_dim = kernel.key.size.head_dim;
    const bool is_for_hopper = kernel.key.architecture == 90;
    const int64_t num_tiles =
        sizes.heads * num_query_tiles(sizes.batch, params.query.rows, sizes.is_packed, query.size(0), block_m);
    const int64_t num_split = num_split_tiles(params, block_n);
    const int64_t num_rows = int64_t{sizes.heads} * (sizes.is_packed ? query.size(0) : query.size(0) * query.size(2));
    const int64_t num_slope_tiles =
        sizes.heads * num_query_tiles(sizes.batch, params.query.rows, sizes.is_packed, query.size(0), kSlopesBlockM);
    const bool counts = is_for_hopper || deterministic;

    return make_workspace(query, [&](WorkspaceArena& arena) {
        params.num_claimed = arena.take<int32_t>(counts ? 1 : 0);
        params.semaphores = arena.take<int32_t>(deterministic ? num_tiles : 0);
        params.key_semaphores = arena.take<int32_t>(deterministic ? num_split * kMostConsumersOfTile : 0);
        params.query_sums = arena.take(num_tiles * query_tile_elements(/*in_panels=*/is_for_hopper, block_m, head_dim));
        params.key_sums = arena.take(num_split * key_tile_elements(block_n, head_dim));
        params.to_zero = arena.taken_memory();
        const auto take_rows = [&](int64_t count) {
            RowsView rows = params.lse;
            rows.data = arena.take(count);
            return rows;
        };
        params.shift = take_rows(num_rows);
        params.delta = take_rows(num_rows);
        params.log2_sum = take_rows(is_additive(params.scores.bias) ? num_rows : 0);
        params.slope_sums = arena.take(params.grad_slopes.data != nullptr ? num_slope_tiles : 0);
        const bool with_options = is_for_hopper && kernel.key.flag.value();
        const int64_t terms = num_tiles * block_m * RowTermsView::numbers_per_row(with_options);
        params.row_terms = {arena.take(is_for_hopper ? terms : 0), block_m, with_options};
    });
}

// The arguments that attention_backward and attention_backward_add have in common, as in their schemas.
struct Arguments {
    Tensor grad_out;
    std::optional<Tensor> grad_lse;
    Tensor query, key, value, out, lse;
    std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k;
    ScoreOptions scores;
    bool deterministic, bias_grad, slopes_grad;

    AttentionSizes checked_sizes() const {
        const AttentionSizes sizes =
            check_attention(kOp, query, key, value, scores.bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                            attention_backward_key_value_kernels().largest_head_dim());
        check_like_query("grad_out", grad_out, query, sizes.value_dim);
        check_like_query("out", out, query, sizes.value_dim);
        return sizes;
    }

    Gradients empty_gradients_of_options() const {
        Gradients gradients;
        gradients.bias = empty_float_gradient(bias_grad ? scores.bias : std::nullopt, query);
        gradients.sinks = empty_float_gradient(scores.sinks, query);
        gradients.slopes = empty_float_gradient(slopes_grad ? scores.alibi_slopes : std::nullopt, query);
        return gradients;
    }
};

// Computes all gradients. If the gradients of query, key and value are fp32, adds to them, else overwrites them.
void run(Arguments given, const AttentionSizes& sizes, Gradients& gradients) {
    const bool adds = gradients.query.scalar_type() == ScalarType::Float;
    const std::optional<Tensor>&bias = given.scores.bias, &alibi_slopes = given.scores.alibi_slopes,
          &sinks = given.scores.sinks;
    given.lse = checked_rows("lse", given.lse, given.query);
    if (given.grad_lse) given.grad_lse = checked_rows("grad_lse", *given.grad_lse, given.query);
    AttentionBackwardParams params{};
    ScoreTensors score_tensors;
    params.scores = score_params(kOp, given.scores, given.query, sizes, score_tensors);
    check(!bias || !given.bias_grad || is_additive(params.scores.bias), kOp,
          "bias must be floating if bias_grad is true, got ", bias ? dtype_text(*bias) : "None");
    if (given.lse.numel() == 0) {  // no query rows; other tensors may still have elements
        for (Tensor* gradient : {&gradients.bias, &gradients.sinks, &gradients.slopes}) torch::stable::zero_(*gradient);
        if (!adds) torch::stable::zero_(gradients.key), torch::stable::zero_(gradients.value);
        return;
    }

    const Tensor query = aligned(given.query), key = aligned(given.key), value = aligned(given.value);
    const Tensor grad_out = aligned(given.grad_out), out = aligned(given.out);
    const Sequences query_sequences = sizes.query_sequences(), key_sequences = sizes.key_sequences();
    params.query = heads_view<const uint16_t>(kOp, "query", query, query_sequences);
    params.key = heads_view<const uint16_t>(kOp, "key", key, key_sequences);
    params.value = heads_view<const uint16_t>(kOp, "value", value, key_sequences);
    params.out = heads_view<const uint16_t>(kOp, "out", out, query_sequences);
    params.grad_out = heads_view<const uint16_t>(kOp, "grad_out", grad_out, query_sequences);
    const auto view_gradients = [&](auto& query_view, auto& key_view, auto& value_view) {
        using Element = std::remove_pointer_t<decltype(query_view.data)>;
        query_view = heads_view<Element>(kOp, "query", gradients.query, query_sequences);
        key_view = heads_view<Element>(kOp, "key", gradients.key, key_sequences);
        value_view = heads_view<Element>(kOp, "value", gradients.value, key_sequences);
    };
    if (adds) {
        view_gradients(params.sum_query, params.sum_key, params.sum_value);
        params.grad_query.head_dim = params.sum_query.head_dim;
        params.grad_key.head_dim = params.sum_key.head_dim;
        params.grad_value.head_dim = params.sum_value.head_dim;
    } else {
        view_gradients(params.grad_query, params.grad_key, params.grad_value);
    }
    params.lse = rows_view(given.lse, params.query);
    if (given.grad_lse) params.grad_lse = rows_view(*given.grad_lse, params.query);
    if (bias && given.bias_grad) params.grad_bias = bias_gradient_view(gradients.bias);
    if (alibi_slopes && given.slopes_grad) {
        params.grad_slopes = {static_cast<float*>(gradients.slopes.data_ptr()),
                              to_int32(kOp, "alibi_slopes", gradients.slopes.size(0))};
    }
    if (sinks) params.grad_sinks = static_cast<float*>(gradients.sinks.data_ptr());
    params.packed = packed_params(kOp, query, key, given.cu_seqlens_q, given.cu_seqlens_k);

    const OnDeviceOf device(query);
    const DeviceFacts facts = device_facts();
    const KernelSize head_dims(params.query.head_dim, params.value.head_dim);
    const BackwardKernels kernels = backward_kernels(
        facts.compute_capability, facts.shared_bytes_per_cta, head_dims, sizes.dtype,
        {given.scores.change_scores(), given.scores.key_ranges.has_value()},
        {params.grad_bias.data != nullptr, params.grad_sinks != nullptr, params.grad_slopes.data != nullptr});
    const TileFacts& tile = kernels.key_value->tile;
    if (kernels.key_value->key.architecture == 90) {
        schedule_key_tiles(params, tile.block_m, tile.block_n, facts, given.deterministic);
    } else {
        params.heads_per_group = key_heads_per_group(params.query, params.key, facts.l2_bytes);
        params.row_splits = {0, 1, 1};
    }
    const Tensor workspace = make_backward_workspace(params, query, sizes, *kernels.key_value, given.deterministic);
    std::optional<Tensor> seen_tiles;
    if (given.scores.key_ranges) {
        const int32_t num_key_tiles = ceil_div(params.key.rows, tile.block_n);
        seen_tiles = make_seen_tiles(params.seen_tiles, params.scores.ranges, query, sizes, tile, num_key_tiles,
                                     SeenTiles::pitch_of_bits(num_key_tiles));
    }
    if (sizes.is_packed && !adds) {
        const PackedParams& packed = params.packed;
        fill_outside_rows({to_zero_outside(params.grad_query, packed.cu_seqlens_q, packed.total_q),
                           to_zero_outside(params.grad_key, packed.cu_seqlens_k, packed.total_k),
                           to_zero_outside(params.grad_value, packed.cu_seqlens_k, packed.total_k)},
                          /*lse=*/{}, facts, device.stream());
    }
    for (BackwardKernels::Row* kernel : kernels.in_order()) {
        if (kernel != nullptr) kernel->launch(params, device.stream());
    }
}

// Checks that `sum` is fp32, has the shape and device of `of`, and is aligned.
void check_sum(const char* name, const Tensor& sum, const Tensor& of) {
    check(sum.scalar_type() == ScalarType::Float, kAddOp, name, " must be float32, got ", dtype_text(sum));
    check(sum.dim() == of.dim(), kAddOp, name, " must have ", of.dim(), " dimensions, got ", sum.dim());
    for (int64_t dim = 0; dim < of.dim(); ++dim) {
        check(sum.size(dim) == of.size(dim), kAddOp, name, " must have shape ", shape_text(of), ", got ",
              shape_text(sum));
    }
    check_device(kAddOp, name, sum, of);
    check(sum.numel() == 0 || is_aligned(sum), kAddOp, name, " is added to in place: ", kAlignedRule);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,
    std::optional<Tensor> bias, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
    std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left, int64_t window_right,
    std::optional<int64_t> first_row, int64_t first_key, int64_t first_head, double softcap, double dropout_p,
    bool deterministic, bool bias_grad, bool slopes_grad, std::optional<Tensor> key_ranges) {
    const ScoreOptions options{bias,         alibi_slopes, sinks,     dropout_seed, key_ranges, scale,    window_left,
                               window_right, first_row,    first_key, first_head,   softcap,    dropout_p};
    const Arguments given{grad_out,     grad_lse, query,         key,          value,
                          out,          lse,      cu_seqlens_q,  cu_seqlens_k, max_seqlen_q,
                          max_seqlen_k, options,  deterministic, bias_grad,    slopes_grad};
    const AttentionSizes sizes = given.checked_sizes();
    Gradients gradients = given.empty_gradients_of_options();
    gradients.query = empty_like_heads(query, query.size(query.dim() - 1));
    gradients.key = empty_like_heads(key, key.size(key.dim() - 1));
    gradients.value = empty_like_heads(value, value.size(value.dim() - 1));
    run(given, sizes, gradients);
    return gradients.all();
}

Tensor attention_backward_add(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_out,
                              std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,
                              Tensor lse, std::optional<Tensor> alibi_slopes, std::optional<Tensor> dropout_seed,
                              std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
                              int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left,
                              int64_t window_right, std::optional<int64_t> first_row, int64_t first_key,
                              int64_t first_head, double softcap, double dropout_p, bool deterministic,
                              bool slopes_grad, std::optional<Tensor> key_ranges) {
    const std::optional<Tensor> none;
    const ScoreOptions options{none,         alibi_slopes, none,      dropout_seed, key_ranges, scale,    window_left,
                               window_right, first_row,    first_key, first_head,   softcap,    dropout_p};
    const Arguments given{grad_out,     grad_lse, query,         key,          value,
                          out,          lse,      cu_seqlens_q,  cu_seqlens_k, max_seqlen_q,
                          max_seqlen_k, options,  deterministic, false,        slopes_grad};
    const AttentionSizes sizes = given.checked_sizes();
    check_sum("grad_query", grad_query, query);
    check_sum("grad_key", grad_key, key);
    check_sum("grad_value", grad_value, value);
    Gradients gradients = given.empty_gradients_of_options();
    gradients.query = grad_query;
    gradients.key = grad_key;
    gradients.value = grad_value;
    run(given, sizes, gradients);
    return gradients.slopes;
}

}  // namespace fastattn
