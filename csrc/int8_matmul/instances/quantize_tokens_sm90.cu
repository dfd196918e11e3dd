// The kernel that quantises tokens to int8 for Hopper's matmul.
#include "int8_matmul/quantize_tokens_sm90.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_quantize_tokens_kernels().add(KernelKey{90, 0, kDataType, /*flag=*/std::nullopt},
                                       kernel_name("int8_matmul_quantize_tokens_sm90", {kDataType}), TileFacts{},
                                       launch_int8_matmul_quantize_tokens_sm90<kDataType>);
});

}  // namespace fastattn
