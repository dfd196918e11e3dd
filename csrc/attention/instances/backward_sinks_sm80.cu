// The gradient of sinks.
#include "attention/backward_sinks_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_backward_sinks_kernels(), KernelKey{80, 0, std::nullopt, false},
                                       kernel_name("attention_backward_sinks_sm80", {}), TileFacts{},
                                       launch_attention_backward_sinks_sm80);

}  // namespace fastattn
