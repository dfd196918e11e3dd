#include "attention/backward_key_value_sm80.cuh"

namespace fastattn {

template void launch_attention_backward_key_value_sm80<192, DataType::kBFloat16, true>(const AttentionBackwardParams&,
                                                                                       Stream);

}  // namespace fastattn
