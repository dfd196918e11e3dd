#include "attention/forward_sm80.cuh"

namespace fastattn {

template void launch_attention_forward_sm80<32, DataType::kBFloat16, false>(const AttentionForwardParams&, Stream);

}  // namespace fastattn
