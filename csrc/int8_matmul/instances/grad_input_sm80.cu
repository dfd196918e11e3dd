// The input gradient of the int8 matmul; compiled with FASTATTN_BLOCK_M and FASTATTN_DTYPE.
#include "int8_matmul/grad_input_sm80.cuh"

namespace fastattn {

static const Registration registration(
    int8_matmul_grad_input_kernels(),
    KernelKey{80, FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE, /*variant=*/std::nullopt},
    kernel_name("int8_matmul_grad_input_sm80", {std::to_string(FASTATTN_BLOCK_M), to_string(DataType::FASTATTN_DTYPE)}),
    int8_tile_facts<Int8GradInputTileSm80<FASTATTN_BLOCK_M>>(),
    launch_int8_matmul_grad_input_sm80<FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
