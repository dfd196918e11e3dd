// The row tiles that see each key tile through ranges of keys.
#include "attention/backward_ranges_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_backward_ranges_kernels(), KernelKey{80, 0, std::nullopt, false},
                                       kernel_name("attention_backward_ranges_sm80", {}), TileFacts{},
                                       launch_attention_backward_ranges_sm80);

}  // namespace fastattn
