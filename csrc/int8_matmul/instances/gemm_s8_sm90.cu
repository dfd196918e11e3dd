// The int8 matmul with int8 activations for Hopper, compiled for each value in the list FASTATTN_BLOCK_M.
#include "int8_matmul/gemm_s8_sm90.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_BLOCK_M>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kBlockM = value;
    int8_matmul_s8_kernels().add(
        KernelKey{90, kBlockM, kDataType, /*flag=*/FASTATTN_GROUPED},
        kernel_name("int8_matmul_s8_sm90", {kBlockM, kDataType, FASTATTN_GROUPED ? "groups" : ""}),
        cluster_tile_facts<Int8MatmulS8TileSm90<kBlockM>>(),
        launch_int8_matmul_s8_sm90<kBlockM, kDataType, FASTATTN_GROUPED>);
});

}  // namespace fastattn
