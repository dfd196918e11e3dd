// The int8 matmul with int8 activations for Hopper; compiled with FASTATTN_BLOCK_M and FASTATTN_GROUPED.
#include "int8_matmul/gemm_s8_sm90.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_matmul_s8_kernels().add(
        KernelKey{90, FASTATTN_BLOCK_M, kDataType, /*variant=*/FASTATTN_GROUPED},
        kernel_name("int8_matmul_s8_sm90", {FASTATTN_BLOCK_M, kDataType, FASTATTN_GROUPED ? "groups" : ""}),
        cluster_tile_facts<Int8MatmulS8TileSm90<FASTATTN_BLOCK_M>>(),
        launch_int8_matmul_s8_sm90<FASTATTN_BLOCK_M, kDataType, FASTATTN_GROUPED>);
});

}  // namespace fastattn
