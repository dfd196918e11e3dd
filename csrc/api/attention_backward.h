// The native kernels behind fastattn::attention_backward; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Returns six gradients: of query, key and value, in their dtype and memory order; of bias, fp32 in its shape, or [0]
// unless bias_grad; of sinks, fp32 [Hq], or [0] without sinks; and of alibi_slopes, fp32 in their shape, or [0] unless
// slopes_grad. out and lse are results of attention_forward; grad_out and grad_lse have their shapes.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,
    std::optional<Tensor> bias, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
    std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left, int64_t window_right,
    std::optional<int64_t> first_row, int64_t first_key, int64_t first_head, double softcap, double dropout_p,
    bool deterministic, bool bias_grad, bool slopes_grad, std::optional<Tensor> key_ranges);

// Does the same for a block of keys, but adds to grad_query, grad_key and grad_value, so that the gradients of several
// blocks can be summed. These three tensors are fp32, aligned to 16 bytes, and have contiguous rows. Returns the
// gradient of alibi_slopes, or [0] unless slopes_grad.
Tensor attention_backward_add(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_out,
                              std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,
                              Tensor lse, std::optional<Tensor> alibi_slopes, std::optional<Tensor> dropout_seed,
                              std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
                              int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left,
                              int64_t window_right, std::optional<int64_t> first_row, int64_t first_key,
                              int64_t first_head, double softcap, double dropout_p, bool deterministic,
                              bool slopes_grad, std::optional<Tensor> key_ranges);

}  // namespace fastattn
