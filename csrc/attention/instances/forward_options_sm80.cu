// Attention forward with options; compiled with FASTATTN_HEAD_DIM, FASTATTN_DTYPE and FASTATTN_PAGED.
#include "attention/forward_options_sm80.cuh"

namespace fastattn {

static const Registration registration(
    attention_forward_options_kernels(), KernelKey{80, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_PAGED},
    kernel_name("attention_forward_options_sm80", {std::to_string(FASTATTN_HEAD_DIM),
                                                   to_string(DataType::FASTATTN_DTYPE), FASTATTN_PAGED ? "paged" : ""}),
    tile_facts<ForwardOptionsTileSm80<FASTATTN_HEAD_DIM>>(),
    launch_attention_forward_options_sm80<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_PAGED>);

}  // namespace fastattn
