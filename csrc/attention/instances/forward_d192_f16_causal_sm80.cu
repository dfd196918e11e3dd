#include "attention/forward_sm80.cuh"

namespace fastattn {

template void launch_attention_forward_sm80<192, DataType::kFloat16, true>(const AttentionForwardParams&, Stream);

}  // namespace fastattn
