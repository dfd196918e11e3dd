// The native kernel behind fastattn::append_to_cache; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastattn {

using torch::stable::Tensor;

// Writes token i of k_new [tokens, Hkv, D] and v_new [tokens, Hkv, Dv] to slot slot_mapping[i] of the caches. Raises
// for bad arguments before it writes anything.
void append_to_cache(Tensor k_new, Tensor v_new, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                     std::optional<Tensor> k_scale, std::optional<Tensor> v_scale);

}  // namespace fastattn
