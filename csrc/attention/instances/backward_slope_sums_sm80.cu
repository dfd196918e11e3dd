// The gradient of ALiBi slopes, from the sums of row tiles.
#include "attention/backward_slope_sums_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_backward_slope_sums_kernels(), KernelKey{80, 0, std::nullopt, false},
                                       kernel_name("attention_backward_slope_sums_sm80", {}), TileFacts{},
                                       launch_attention_backward_slope_sums_sm80);

}  // namespace fastattn
