// The native forward kernels, as the host sees them: each is instantiated in one file under instances/.
#pragma once

#include "host/params.h"

namespace fastattn {

// Starts attention on `stream` of the current device. Throws std::runtime_error, naming the kernel, where it cannot.
template <int kHeadDim, DataType kDataType, bool kCausal>
void launch_attention_forward_sm80(const AttentionForwardParams& params, Stream stream);

template <int kHeadDim, DataType kDataType, bool kPaged>
void launch_attention_forward_options_sm80(const AttentionOptionsParams& params, Stream stream);

}  // namespace fastattn
