#include "attention/backward_key_value_sm80.cuh"

namespace fastattn {

template void launch_attention_backward_key_value_sm80<64, DataType::kBFloat16, false>(const AttentionBackwardParams&,
                                                                                       Stream);

}  // namespace fastattn
