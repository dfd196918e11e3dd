#include "attention/forward_options_sm80.cuh"

namespace fastattn {

template void launch_attention_forward_options_sm80<192, DataType::kBFloat16, /*kPaged=*/false>(
    const AttentionOptionsParams&, Stream);

}  // namespace fastattn
