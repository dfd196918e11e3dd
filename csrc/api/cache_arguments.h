// Checks the KV caches among an op's arguments, and makes the views of them that kernel parameters hold.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "api/checks.h"
#include "host/decode_params.h"

namespace fastattn {

// Returns the format of a cache. Checks that a 16-bit cache has the dtype of `like`, which is the argument called
// like_name.
inline CacheFormat cache_format(const char* op, const char* name, const Tensor& cache, const char* like_name,
                                const Tensor& like) {
    if (cache.scalar_type() == ScalarType::Char) return CacheFormat::kInt8;
    if (cache.scalar_type() == ScalarType::Float8_e4m3fn) return CacheFormat::kFp8;
    check(cache.scalar_type() == like.scalar_type(), op, name, " must be int8 or float8_e4m3fn, or have the dtype of ",
          like_name, ", ", dtype_text(like), ", got ", dtype_text(cache));
    return CacheFormat::k16Bit;
}

// Checks that both caches have the same format, are on the device of `like`, and can be written in place by a kernel.
// Returns the format.
inline CacheFormat check_written(const char* op, const Tensor& k_cache, const Tensor& v_cache, const char* like_name,
                                 const Tensor& like) {
    const CacheFormat format = cache_format(op, "k_cache", k_cache, like_name, like);
    check(v_cache.scalar_type() == k_cache.scalar_type(), op, "v_cache must have the dtype of k_cache, ",
          dtype_text(k_cache), ", got ", dtype_text(v_cache));
    for (const auto& [name, cache] : {std::pair{"k_cache", k_cache}, {"v_cache", v_cache}}) {
        check_device(op, name, cache, like, like_name);
        check(cache.numel() == 0 || is_aligned(cache), op, name, " is written in place: ", kAlignedRule);
    }
    return format;
}

inline constexpr int64_t kMostTokens = int64_t{1} << 30;  // sums of positions stay within 32 bits

// Returns how many tokens a sequence can have in the caches. Checks that this is less than kMostTokens.
inline int32_t checked_capacity(const char* op, const Tensor& k_cache, const std::optional<Tensor>& block_table) {
    const int64_t capacity = k_cache.size(2) * (block_table ? block_table->size(1) : 1);
    check(capacity < kMostTokens, op, "k_cache must hold fewer than 2^30 tokens of a sequence, got ", capacity);
    return static_cast<int32_t>(capacity);
}

inline CacheLayout cache_layout(const char* op, const Tensor& k_cache, const std::optional<Tensor>& block_table) {
    CacheLayout layout{};
    layout.num_blocks = to_int32(op, "k_cache", k_cache.size(0));
    layout.block_rows = to_int32(op, "k_cache", k_cache.size(2));
    layout.by_block_rows = Divisor::of(std::max(layout.block_rows, 1));
    if (block_table) {
        layout.block_table = static_cast<const int32_t*>(block_table->data_ptr());
        layout.table_batch_stride = block_table->stride(0);
        layout.table_page_stride = block_table->stride(1);
    }
    return layout;
}

// Returns whether there is one scale for each head, or for all heads, instead of one for each token.
inline bool are_given(const Tensor& scales) {
    return scales.dim() < 3;
}

// Checks the fp32 scales of a cache. An int8 cache needs scales [blocks, kv_heads, block_rows]. An fp8 cache takes the
// same shape, [kv_heads], [1] or [], or no scales, which means a scale of 1. A 16-bit cache takes no scales.
inline void check_scales(const char* op, const char* name, const std::optional<Tensor>& scales, const Tensor& cache) {
    const bool is_fp8 = cache.scalar_type() == ScalarType::Float8_e4m3fn;
    if (!is_fp8 && cache.scalar_type() != ScalarType::Char) return check_absent(op, name, scales);
    check(is_fp8 || scales.has_value(), op, name, " must be a float32 tensor for an int8 cache, got None");
    if (!scales) return;
    if (!is_fp8 || !are_given(*scales)) {
        check_shape(op, name, *scales, {cache.size(0), cache.size(1), cache.size(2)});
    } else if (scales->numel() != 1) {
        check_shape(op, name, *scales, {cache.size(1)});
    }
    check(scales->scalar_type() == ScalarType::Float, op, name, " must be float32, got ", dtype_text(*scales));
    check_device(op, name, *scales, cache, "the cache");
}

inline CacheView cache_view(const char* op, const char* name, const Tensor& cache, const char* scale_name,
                            const std::optional<Tensor>& scales) {
    CacheView view{};
    view.data = cache.data_ptr();
    view.head_dim = to_int32(op, name, cache.size(3));
    view.head_bytes = cache.stride(1) * cache.element_size();
    view.block_chunks = stride_in_chunks(op, name, cache, 0);
    view.row_chunks = stride_in_chunks(op, name, cache, 2);
    view.scales_are_per_head = !scales || are_given(*scales);
    if (!scales) return view;
    view.scales = static_cast<float*>(scales->data_ptr());
    if (view.scales_are_per_head) {
        view.scale_head_stride = scales->numel() > 1 ? scales->stride(0) : 0;
    } else {
        view.scale_head_stride = scales->stride(1);
        view.scale_block_stride = stride_in_elements(op, scale_name, *scales, 0);
        view.scale_row_stride = stride_in_elements(op, scale_name, *scales, 2);
    }
    return view;
}

}  // namespace fastattn
