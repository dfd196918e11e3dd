// The kernel that converts int8 weights to 16-bit floats.
#include "int8_matmul/dequantize_weight_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_dequantize_weight_kernels().add(KernelKey{80, 0, kDataType, /*flag=*/std::nullopt},
                                         kernel_name("int8_dequantize_weight_sm80", {kDataType}), TileFacts{},
                                         launch_int8_dequantize_weight_sm80<kDataType>);
});

}  // namespace fastattn
