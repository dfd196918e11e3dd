// Converts the options that change or mask scores from arguments of the attention ops to ScoreParams.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include "api/attention_arguments.h"
#include "host/params.h"

namespace fastattn {

// The options of attention_forward and attention_backward that change or mask scores.
struct ScoreOptions {
    const std::optional<Tensor>&bias, &alibi_slopes, &sinks, &dropout_seed, &key_ranges;
    double scale;
    int64_t window_left, window_right;
    std::optional<int64_t> first_row;  // of a block in a larger call; none: the last row is at the last key
    int64_t first_key, first_head;
    double softcap, dropout_p;

    // Returns whether options other than the scale and a window change or mask scores. This needs the kernels with
    // options.
    bool change_scores() const { return bias || alibi_slopes || key_ranges || dropout_p > 0 || softcap > 0; }
};

// Tensors that params point into; they must live until the kernel is launched.
struct ScoreTensors {
    std::optional<Tensor> alibi_slopes, sinks, key_ranges;
};

inline BiasView::Kind bias_kind(const char* op, const Tensor& bias) {
    switch (bias.scalar_type()) {
        case ScalarType::Bool:
            return BiasView::Kind::kBool;
        case ScalarType::Half:
            return BiasView::Kind::kFloat16;
        case ScalarType::BFloat16:
            return BiasView::Kind::kBFloat16;
        case ScalarType::Float:
            return BiasView::Kind::kFloat32;
        default:
            check(false, op, "bias must be bool, float16, bfloat16 or float32 for the native kernel, got ",
                  dtype_text(bias));
            return BiasView::Kind::kNone;
    }
}

// Returns the view of a bias, [batch or 1, heads or 1, rows or 1, keys or 1] with any strides. full: the sizes without
// broadcasting.
inline BiasView bias_view(const char* op, const Tensor& bias, std::initializer_list<int64_t> full) {
    check_rank(op, "bias", bias, 4);
    int64_t strides[4];
    for (int64_t dim = 0; dim < 4; ++dim) {
        const int64_t size = bias.size(dim), expected = full.begin()[dim];
        check(size == expected || size == 1, op, "bias must have size ", expected, " or 1 in dim ", dim, ", got shape ",
              shape_text(bias));
        strides[dim] = size == 1 ? 0 : bias.stride(dim);
    }
    const bool in_pairs = strides[3] == 1 && strides[0] % 2 == 0 && strides[1] % 2 == 0 && strides[2] % 2 == 0 &&
                          reinterpret_cast<uintptr_t>(bias.data_ptr()) % (2 * bias.element_size()) == 0;
    return {bias.data_ptr(), bias_kind(op, bias), strides[0], strides[1], strides[2], strides[3], in_pairs};
}

// Checks that a tensor is fp32 and on the device of query, and returns it contiguous.
inline Tensor float_tensor(const char* op, const char* name, const Tensor& tensor, const Tensor& query) {
    check(tensor.scalar_type() == ScalarType::Float, op, name, " must be float32, got ", dtype_text(tensor));
    check_device(op, name, tensor, query);
    return torch::stable::contiguous(tensor);
}

// Returns one side of a window, or kUnbounded if it hides no key. farthest: the largest distance between a row and a
// key on this side.
inline int32_t window_side(int64_t side, int64_t farthest) {
    const bool hides_some = side >= 0 && side < std::min<int64_t>(farthest, ScoreParams::kUnbounded);
    return hides_some ? static_cast<int32_t>(side) : ScoreParams::kUnbounded;
}

// Sets a block's position in a larger call, and its window, in `params`.
inline void locate_block(const char* op, const ScoreOptions& options, const AttentionSizes& sizes,
                         ScoreParams& params) {
    constexpr int64_t kMostPositions = 0x7fffffff;
    const int64_t first_row = options.first_row.value_or(0);
    for (const auto& [name, first, count] : {std::tuple{"first_row", first_row, sizes.rows},
                                             {"first_key", options.first_key, sizes.keys},
                                             {"first_head", options.first_head, sizes.batch * sizes.heads}}) {
        check(first == 0 || (first > 0 && first + count <= kMostPositions), op, name, " must be from 0 to ",
              kMostPositions, " - ", count, ", got ", first);
    }
    check(options.dropout_p == 0 || options.first_key % 4 == 0, op,
          "first_key must be a multiple of 4 with dropout, got ", options.first_key);
    if (options.first_row) params.query_offset = static_cast<int32_t>(first_row - options.first_key);
    params.dropout_origin = {static_cast<uint32_t>(first_row), static_cast<uint32_t>(options.first_key),
                             static_cast<uint32_t>(options.first_head)};
    // The largest distances from a row back to the first key, and forward to the last key. Without first_row both are
    // upper bounds, because the lengths of packed sequences are unknown.
    const int64_t behind = options.first_row ? sizes.rows - 1 + params.query_offset : sizes.keys + sizes.rows;
    const int64_t before = options.first_row ? sizes.keys - 1 - params.query_offset : sizes.keys + sizes.rows;
    params.window_left = window_side(options.window_left, behind);
    params.window_right = window_side(options.window_right, before);
}

inline ScoreParams score_params(const char* op, const ScoreOptions& options, const Tensor& query,
                                const AttentionSizes& sizes, ScoreTensors& tensors) {
    const auto [batch, heads, rows, keys] = std::tuple{sizes.batch, sizes.heads, sizes.rows, sizes.keys};
    ScoreParams params{};
    params.scale = static_cast<float>(options.scale);
    params.softcap = static_cast<float>(std::max(options.softcap, 0.0));
    params.outer_scale = params.softcap > 0 ? params.softcap : params.scale;
    params.scale_over_softcap = options.softcap > 0 ? static_cast<float>(options.scale / options.softcap) : 0.0f;
    locate_block(op, options, sizes, params);
    if (options.bias) {
        check_device(op, "bias", *options.bias, query);
        params.bias = bias_view(op, *options.bias, {batch, heads, rows, keys});
    }
    if (options.alibi_slopes) {
        tensors.alibi_slopes = float_tensor(op, "alibi_slopes", *options.alibi_slopes, query);
        const Tensor& slopes = *tensors.alibi_slopes;
        check_rank(op, "alibi_slopes", slopes, 2);
        check_shape(op, "alibi_slopes", slopes, {slopes.size(0) == 1 ? 1 : batch, heads});
        params.alibi_slopes = static_cast<const float*>(slopes.data_ptr());
        params.alibi_batch_stride = slopes.size(0) == 1 ? 0 : heads;
    }
    if (options.sinks) {
        tensors.sinks = float_tensor(op, "sinks", *options.sinks, query);
        check_shape(op, "sinks", *tensors.sinks, {heads});
        params.sinks = static_cast<const float*>(tensors.sinks->data_ptr());
    }
    if (options.key_ranges) {
        tensors.key_ranges = *options.key_ranges;
        params.ranges = key_ranges_view(op, *tensors.key_ranges, query, sizes);
    }
    if (options.dropout_p > 0) {
        check(options.dropout_seed.has_value(), op,
              "dropout_seed must be an int64 tensor of one element if dropout_p > 0, got None");
        const Tensor& seed = *options.dropout_seed;
        check(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, op,
              "dropout_seed must be an int64 tensor of one element, got ", dtype_text(seed), " ", shape_text(seed));
        check_device(op, "dropout_seed", seed, query);
        params.dropout_seed = static_cast<const int64_t*>(seed.data_ptr());
        params.dropout_threshold =
            static_cast<uint32_t>(std::min(std::floor(options.dropout_p * 4294967296.0), 4294967295.0));
        params.dropout_factor = options.dropout_p < 1 ? static_cast<float>(1 / (1 - options.dropout_p)) : 0.0f;
    }
    return params;
}

}  // namespace fastattn
