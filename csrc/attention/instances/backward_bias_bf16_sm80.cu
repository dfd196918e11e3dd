#include "attention/backward_bias_sm80.cuh"

namespace fastattn {

template void launch_attention_backward_bias_sm80<DataType::kBFloat16>(const AttentionBackwardParams&, Stream);

}  // namespace fastattn
