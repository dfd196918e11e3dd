// Int8 weights as 16-bit floats; compiled with FASTATTN_DTYPE.
#include "int8_matmul/dequantize_weight_sm80.cuh"

namespace fastattn {

static const Registration registration(int8_dequantize_weight_kernels(),
                                       KernelKey{80, 0, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
                                       kernel_name("int8_dequantize_weight_sm80",
                                                   {to_string(DataType::FASTATTN_DTYPE)}),
                                       TileFacts{}, launch_int8_dequantize_weight_sm80<DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
