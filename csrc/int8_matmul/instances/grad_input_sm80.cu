// The input gradient of the int8 matmul, compiled for each value in the list FASTATTN_BLOCK_M.
#include "int8_matmul/grad_input_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_BLOCK_M>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kBlockM = value;
    int8_matmul_grad_input_kernels().add(KernelKey{80, kBlockM, kDataType, /*flag=*/std::nullopt},
                                         kernel_name("int8_matmul_grad_input_sm80", {kBlockM, kDataType}),
                                         int8_tile_facts<Int8GradInputTileSm80<kBlockM>>(),
                                         launch_int8_matmul_grad_input_sm80<kBlockM, kDataType>);
});

}  // namespace fastattn
