// The int8 matmul with int8 activations for Hopper; compiled with FASTATTN_BLOCK_M, FASTATTN_DTYPE and FASTATTN_GROUPED.
#include "int8_matmul/gemm_s8_sm90.cuh"

namespace fastattn {

static const Registration registration(
    int8_matmul_s8_kernels(), KernelKey{90, FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE, /*variant=*/FASTATTN_GROUPED},
    kernel_name("int8_matmul_s8_sm90", {std::to_string(FASTATTN_BLOCK_M), to_string(DataType::FASTATTN_DTYPE),
                                        FASTATTN_GROUPED ? "groups" : ""}),
    team_tile_facts<Int8MatmulS8TileSm90<FASTATTN_BLOCK_M>>(),
    launch_int8_matmul_s8_sm90<FASTATTN_BLOCK_M, DataType::FASTATTN_DTYPE, FASTATTN_GROUPED>);

}  // namespace fastattn
