// dQ for Hopper; compiled with FASTATTN_HEAD_DIM and FASTATTN_DTYPE.
#include "attention/backward_query_sm90.cuh"

namespace fastattn {

static const Registration registration(
    attention_backward_query_kernels(), KernelKey{90, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, false},
    kernel_name("attention_backward_query_sm90",
                {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE)}),
    TileFacts{}, launch_attention_backward_query_sm90<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
