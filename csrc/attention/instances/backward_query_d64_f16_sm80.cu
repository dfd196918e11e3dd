#include "attention/backward_query_sm80.cuh"

namespace fastattn {

template void launch_attention_backward_query_sm80<64, DataType::kFloat16>(const AttentionBackwardParams&, Stream);

}  // namespace fastattn
