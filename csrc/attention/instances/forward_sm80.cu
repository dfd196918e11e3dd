// Attention forward; compiled with FASTATTN_HEAD_DIM and FASTATTN_DTYPE.
#include "attention/forward_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_forward_kernels(),
                                       KernelKey{80, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, false},
                                       kernel_name("attention_forward_sm80", {std::to_string(FASTATTN_HEAD_DIM),
                                                                              to_string(DataType::FASTATTN_DTYPE)}),
                                       tile_facts<ForwardTileSm80<FASTATTN_HEAD_DIM>>(),
                                       launch_attention_forward_sm80<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
