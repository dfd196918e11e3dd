// The caches among the arguments of an op that writes to them: their checks, and how a kernel gets them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "api/checks.h"
#include "host/decode_params.h"

namespace fastattn {

inline void check_head_dim(const char* op, const char* name, const Tensor& tensor, int32_t most) {
    const int64_t head_dim = tensor.size(tensor.dim() - 1);
    check(head_dim > 0 && head_dim % 8 == 0 && head_dim <= most, op, name,
          " must have a head dim that is a multiple of 8 up to ", most, ", got ", head_dim);
}

// Both int8 or of the dtype of `like`, which is called like_name, on its device, and placed so that a kernel can write
// their rows.
inline void check_written(const char* op, const Tensor& k_cache, const Tensor& v_cache, const char* like_name,
                          const Tensor& like) {
    const bool is_int8 = k_cache.scalar_type() == ScalarType::Char;
    check(is_int8 || k_cache.scalar_type() == like.scalar_type(), op, "k_cache must be int8 or of the dtype of ",
          like_name, ", ", dtype_text(like), ", got ", dtype_text(k_cache));
    check(v_cache.scalar_type() == k_cache.scalar_type(), op, "v_cache must have the dtype of k_cache, ",
          dtype_text(k_cache), ", got ", dtype_text(v_cache));
    for (const auto& [name, cache] : {std::pair{"k_cache", k_cache}, {"v_cache", v_cache}}) {
        check_device(op, name, cache, like, like_name);
        check(cache.numel() == 0 || is_aligned(cache), op, name,
              " is written in place: its last dim must be contiguous, its base and strides multiples of 16 bytes");
    }
}

// Beside int8 caches, fp32 [blocks, kv_heads, block_rows]; beside others, none.
inline void check_scales(const char* op, const char* name, const std::optional<Tensor>& scales, const Tensor& cache) {
    if (cache.scalar_type() != ScalarType::Char) return check_absent(op, name, scales);
    check(scales.has_value(), op, name, " must be a float32 tensor beside an int8 cache");
    check_shape(op, name, *scales, {cache.size(0), cache.size(1), cache.size(2)});
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
    if (scales) {
        view.scales = static_cast<float*>(scales->data_ptr());
        view.scale_head_stride = scales->stride(1);
        view.scale_block_stride = stride_in_elements(op, scale_name, *scales, 0);
        view.scale_row_stride = stride_in_elements(op, scale_name, *scales, 2);
    }
    return view;
}

}  // namespace fastattn
