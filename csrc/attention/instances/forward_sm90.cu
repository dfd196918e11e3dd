// Attention forward for Hopper; compiled with FASTATTN_HEAD_DIM and FASTATTN_DTYPE.
#include "attention/forward_sm90.cuh"

namespace fastattn {

static const Registration registration(
    attention_forward_kernels(), KernelKey{90, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
    kernel_name("attention_forward_sm90", {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE)}),
    tile_facts<ForwardConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_HEAD_DIM>>(),
    launch_attention_forward_sm90<FASTATTN_HEAD_DIM, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
