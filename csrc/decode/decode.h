// The native kernels of flash-decoding, as the host sees them: each is instantiated in one file under instances/.
#pragma once

#include "host/decode_params.h"

namespace fastattn {

// Starts a kernel on `stream` of the current device. Throws std::runtime_error, naming the kernel, where it cannot.
template <int kHeadDim, DataType kDataType, bool kInt8>
void launch_decode_split_sm80(const DecodeParams& params, Stream stream);

}  // namespace fastattn
