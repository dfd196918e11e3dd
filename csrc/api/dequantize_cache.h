// The native kernel behind fastattn::dequantize_cache; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastattn {

using torch::stable::Tensor;

// Dequantises the first seqlens[b] tokens of each sequence b to the 16-bit tensors k_out and v_out, [B * max_pages,
// Hkv, page_size, D or Dv]. Page p of sequence b becomes block b * max_pages + p. For contiguous caches, max_pages is 1
// and page_size the capacity.
void dequantize_cache(Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                      Tensor seqlens, std::optional<Tensor> block_table, Tensor k_out, Tensor v_out);

}  // namespace fastattn
