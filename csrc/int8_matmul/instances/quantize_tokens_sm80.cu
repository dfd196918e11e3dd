// The kernel that quantises tokens to int8.
#include "int8_matmul/quantize_tokens_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_quantize_tokens_kernels().add(KernelKey{80, 0, kDataType, /*flag=*/std::nullopt},
                                       kernel_name("int8_quantize_tokens_sm80", {kDataType}), TileFacts{},
                                       launch_int8_quantize_tokens_sm80<kDataType>);
});

}  // namespace fastattn
