// The int8 matmul for Hopper; compiled with FASTATTN_BLOCK_M and FASTATTN_GROUPED.
#include "int8_matmul/gemm_sm90.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_matmul_kernels().add(
        KernelKey{90, FASTATTN_BLOCK_M, kDataType, /*variant=*/FASTATTN_GROUPED},
        kernel_name("int8_matmul_sm90", {FASTATTN_BLOCK_M, kDataType, FASTATTN_GROUPED ? "groups" : ""}),
        cluster_tile_facts<Int8MatmulTileSm90<FASTATTN_BLOCK_M>>(),
        launch_int8_matmul_sm90<FASTATTN_BLOCK_M, kDataType, FASTATTN_GROUPED>);
});

}  // namespace fastattn
