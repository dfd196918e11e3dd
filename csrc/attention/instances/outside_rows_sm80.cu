// The kernel that fills the rows of packed tensors that belong to no sequence.
#include "attention/outside_rows_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_outside_rows_kernels(), KernelKey{80, 0, std::nullopt, false},
                                       kernel_name("attention_outside_rows_sm80", {}), TileFacts{},
                                       launch_attention_outside_rows_sm80);

}  // namespace fastattn
