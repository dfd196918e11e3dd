// dK and dV for Hopper; compiled with FASTATTN_HEAD_DIM and FASTATTN_DTYPE.
#include "attention/backward_key_value_sm90.cuh"

namespace fastattn {

static const Registration registration(
    attention_backward_key_value_kernels(),
    KernelKey{90, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, /*variant=*/false},
    kernel_name("attention_backward_key_value_sm90",
                {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE)}),
    tile_facts<BackwardConfigSm90<FASTATTN_HEAD_DIM>>(),
    launch_attention_backward_key_value_sm90<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
