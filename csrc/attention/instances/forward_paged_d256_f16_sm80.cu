#include "attention/forward_options_sm80.cuh"

namespace fastattn {

template void launch_attention_forward_options_sm80<256, DataType::kFloat16, /*kPaged=*/true>(
    const AttentionOptionsParams&, Stream);

}  // namespace fastattn
