// The native kernel behind fastattn::attention_forward; its schema is in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Returns out [B, Hq, Sq, Dv], lse [B, Hq, Sq] and the largest score of each head, [Hq], or [0] unless
// return_max_logit. For packed sequences, out is [total_q, Hq, Dv] and lse [Hq, total_q]. Raises for every option that
// the native kernels lack: the dispatcher sends such calls to another backend.
std::tuple<Tensor, Tensor, Tensor> attention_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias, std::optional<Tensor> alibi_slopes,
    std::optional<Tensor> sinks, std::optional<Tensor> dropout_seed, std::optional<Tensor> cu_seqlens_q,
    std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, int64_t window_left,
    int64_t window_right, std::optional<int64_t> first_row, int64_t first_key, int64_t first_head, double softcap,
    double dropout_p, std::optional<Tensor> block_table, bool batch_invariant, bool return_max_logit, bool exact_out,
    std::optional<Tensor> key_ranges);

}  // namespace fastattn
