// The native kernel behind fastattn::dequantize_cache; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastattn {

using torch::stable::Tensor;

// Dequantises the first seqlens[b] tokens of sequence b to 16-bit k_out and v_out [B * max_pages, Hkv, rows, D or Dv],
// page p to block b * max_pages + p. For contiguous caches, max_pages is 1.
void dequantize_cache(Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                      Tensor seqlens, std::optional<Tensor> block_table, Tensor k_out, Tensor v_out);

}  // namespace fastattn
