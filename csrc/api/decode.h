// The native kernels behind fastattn::attention_decode, attention_decode_out and attention_split_keys; their schemas
// are in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Appends k_new and v_new to the caches in place, then attends: writes the output [B, Hq, Sq, Dv] to `out` and returns
// the lse [B, Hq, Sq]. Raises for bad arguments before it writes anything.
Tensor attention_decode_out(Tensor query, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens,
                            std::optional<Tensor> k_new, std::optional<Tensor> v_new, std::optional<Tensor> rotary_cos,
                            std::optional<Tensor> rotary_sin, bool rotary_interleaved,
                            std::optional<Tensor> block_table, std::optional<Tensor> k_scale,
                            std::optional<Tensor> v_scale, std::optional<Tensor> alibi_slopes,
                            std::optional<Tensor> sinks, double scale, int64_t window_left, int64_t window_right,
                            double softcap, int64_t num_splits, bool batch_invariant, std::optional<Tensor> tree_mask,
                            Tensor out);

// Does the same with an output that it allocates in the memory order of `query`. Returns the output and the lse.
std::tuple<Tensor, Tensor> attention_decode(Tensor query, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens,
                                            std::optional<Tensor> k_new, std::optional<Tensor> v_new,
                                            std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin,
                                            bool rotary_interleaved, std::optional<Tensor> block_table,
                                            std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                                            std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                            double scale, int64_t window_left, int64_t window_right, double softcap,
                                            int64_t num_splits, bool batch_invariant, std::optional<Tensor> tree_mask);

// Attends like attention_decode to all keys [B, Hkv, Sk, D] and values [B, Hkv, Sk, Dv], without writing to them.
// Copies key and value if they are not aligned. Errors call the op attention_decode, and key and value k_cache and
// v_cache.
std::tuple<Tensor, Tensor> attention_split_keys(Tensor query, Tensor key, Tensor value,
                                                std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                                                double scale, int64_t window_left, int64_t window_right,
                                                double softcap);

}  // namespace fastattn
