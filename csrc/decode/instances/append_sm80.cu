// The append by slots; compiled with FASTATTN_HEAD_DIM, FASTATTN_DTYPE and FASTATTN_INT8, which says what the cache holds.
#include "decode/append_sm80.cuh"

namespace fastattn {

static const Registration registration(
    decode_append_kernels(), KernelKey{80, FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_INT8},
    kernel_name("decode_append_sm80",
                {std::to_string(FASTATTN_HEAD_DIM), to_string(DataType::FASTATTN_DTYPE), FASTATTN_INT8 ? "int8" : ""}),
    TileFacts{}, launch_decode_append_sm80<FASTATTN_HEAD_DIM, DataType::FASTATTN_DTYPE, FASTATTN_INT8>);

}  // namespace fastattn
