// The input gradient of the int8 matmul for Hopper, compiled for each value in the list FASTATTN_BLOCK_M.
#include "int8_matmul/grad_input_sm90.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_BLOCK_M>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kBlockM = value;
    int8_matmul_grad_input_kernels().add(KernelKey{90, kBlockM, kDataType, /*flag=*/std::nullopt},
                                         kernel_name("int8_matmul_grad_input_sm90", {kBlockM, kDataType}),
                                         cluster_tile_facts<Int8GradInputTileSm90<kBlockM>>(/*is_gradient=*/true),
                                         launch_int8_matmul_grad_input_sm90<kBlockM, kDataType>);
});

}  // namespace fastattn
