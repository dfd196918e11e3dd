// Attention forward for Hopper; compiled with FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM and FASTATTN_DTYPE.
#include "attention/forward_sm90.cuh"

namespace fastattn {

static constexpr KernelSize kHeadDims(FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM);

static const Registration registration(
    attention_forward_kernels(), KernelKey{90, kHeadDims, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
    kernel_name("attention_forward_sm90", {to_string(kHeadDims), to_string(DataType::FASTATTN_DTYPE)}),
    tile_facts<ForwardConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM>>(),
    launch_attention_forward_sm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
