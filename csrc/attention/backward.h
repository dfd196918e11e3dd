// The native backward kernels, as the host sees them: each is instantiated in files under instances/.
#pragma once

#include "host/params.h"

namespace fastattn {

// Each starts one kernel on `stream` of the current device. Throws std::runtime_error, naming the kernel, where it
// cannot.

// delta, shift and log2_sum of every query row.
template <DataType kDataType>
void launch_attention_backward_rows_sm80(const AttentionBackwardParams& params, Stream stream);

// dK and dV, and dQ into query_sums. Without kOptions scores are only scaled, and masked by a window.
template <int kHeadDim, DataType kDataType, bool kOptions>
void launch_attention_backward_key_value_sm80(const AttentionBackwardParams& params, Stream stream);

// dQ out of query_sums.
template <int kHeadDim, DataType kDataType>
void launch_attention_backward_query_sm80(const AttentionBackwardParams& params, Stream stream);

// grad_bias. Any head dims.
template <DataType kDataType>
void launch_attention_backward_bias_sm80(const AttentionBackwardParams& params, Stream stream);

// grad_sinks, from lse and delta.
void launch_attention_backward_sinks_sm80(const AttentionBackwardParams& params, Stream stream);

}  // namespace fastattn
