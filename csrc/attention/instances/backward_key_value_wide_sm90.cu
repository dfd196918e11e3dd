// dK and dV for Hopper with more than 128 dims; compiled with FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM and FASTATTN_DTYPE.
#include "attention/backward_key_value_wide_sm90.cuh"

namespace fastattn {

static constexpr KernelSize kHeadDims(FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM);

static const Registration registration(
    attention_backward_key_value_kernels(), KernelKey{90, kHeadDims, DataType::FASTATTN_DTYPE, /*variant=*/false},
    kernel_name("attention_backward_key_value_wide_sm90", {to_string(kHeadDims), to_string(DataType::FASTATTN_DTYPE)}),
    tile_facts<BackwardWideConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM>>(),
    launch_attention_backward_key_value_wide_sm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
