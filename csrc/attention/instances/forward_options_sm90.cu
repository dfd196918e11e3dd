// Attention forward with options for Hopper; compiled with FASTATTN_HEAD_DIM and FASTATTN_DTYPE.
#include "attention/forward_options_sm90.cuh"

namespace fastattn {

static const Registration registration(
    attention_forward_options_kernels(),
    KernelKey{90, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
    kernel_name("attention_forward_options_sm90",
                {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE)}),
    tile_facts<ForwardOptionsConfigSm90<FASTATTN_HEAD_DIM>>(),
    launch_attention_forward_options_sm90<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
