// The native kernel behind fastattn::dequantize_cache; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastattn {

using torch::stable::Tensor;

// Writes the first seqlens[b] tokens of 8-bit caches to k_out and v_out [B * max_pages, Hkv, rows, D or Dv], 16-bit
// floats, page p of sequence b to block b * max_pages + p; of contiguous caches, max_pages is 1.
void dequantize_cache(Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                      Tensor seqlens, std::optional<Tensor> block_table, Tensor k_out, Tensor v_out);

}  // namespace fastattn
