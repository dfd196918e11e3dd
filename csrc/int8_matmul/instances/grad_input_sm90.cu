// The input gradient of the int8 matmul for Hopper; compiled with FASTATTN_BLOCK_M and FASTATTN_DTYPE.
#include "int8_matmul/grad_input_sm90.cuh"

namespace fastattn {

static const Registration registration(
    int8_matmul_grad_input_kernels(),
    KernelKey{90, FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
    kernel_name("int8_matmul_grad_input_sm90", {std::to_string(FASTATTN_BLOCK_M), to_string(DataType::FASTATTN_DTYPE)}),
    team_tile_facts<Int8GradInputTileSm90<FASTATTN_BLOCK_M>>(/*is_gradient=*/true),
    launch_int8_matmul_grad_input_sm90<FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
