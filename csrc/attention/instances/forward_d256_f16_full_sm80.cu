#include "attention/forward_sm80.cuh"

namespace fastattn {

template void launch_attention_forward_sm80<256, DataType::kFloat16, false>(const AttentionForwardParams&, Stream);

}  // namespace fastattn
