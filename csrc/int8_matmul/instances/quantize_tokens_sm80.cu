// The kernel that makes int8 numbers of tokens; compiled with FASTATTN_DTYPE.
#include "int8_matmul/quantize_tokens_sm80.cuh"

namespace fastattn {

static const Registration registration(int8_quantize_tokens_kernels(),
                                       KernelKey{80, 0, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
                                       kernel_name("int8_quantize_tokens_sm80", {to_string(DataType::FASTATTN_DTYPE)}),
                                       TileFacts{}, launch_int8_quantize_tokens_sm80<DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
