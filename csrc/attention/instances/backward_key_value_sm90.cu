// dK and dV for Hopper; compiled with FASTATTN_HEAD_DIM, FASTATTN_DTYPE and FASTATTN_OPTIONS.
#include "attention/backward_key_value_sm90.cuh"

namespace fastattn {

static const Registration registration(
    attention_backward_key_value_kernels(),
    KernelKey{90, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_OPTIONS},
    kernel_name("attention_backward_key_value_sm90",
                {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE),
                 FASTATTN_OPTIONS ? "options" : ""}),
    tile_facts<BackwardConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_OPTIONS>>(),
    launch_attention_backward_key_value_sm90<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_OPTIONS>);

}  // namespace fastattn
