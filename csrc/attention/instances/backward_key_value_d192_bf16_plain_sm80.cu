#include "attention/backward_key_value_sm80.cuh"

namespace fastattn {

template void launch_attention_backward_key_value_sm80<192, DataType::kBFloat16, false>(const AttentionBackwardParams&,
                                                                                        Stream);

}  // namespace fastattn
