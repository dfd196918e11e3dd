// The input gradient of the int8 matmul for Hopper; compiled with FASTATTN_BLOCK_M.
#include "int8_matmul/grad_input_sm90.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_matmul_grad_input_kernels().add(
        KernelKey{90, FASTATTN_BLOCK_M, kDataType, /*variant=*/std::nullopt},
        kernel_name("int8_matmul_grad_input_sm90", {FASTATTN_BLOCK_M, kDataType}),
        cluster_tile_facts<Int8GradInputTileSm90<FASTATTN_BLOCK_M>>(/*is_gradient=*/true),
        launch_int8_matmul_grad_input_sm90<FASTATTN_BLOCK_M, kDataType>);
});

}  // namespace fastattn
