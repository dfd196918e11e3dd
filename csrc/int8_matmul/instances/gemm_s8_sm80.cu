// The int8 matmul with int8 activations, compiled for each value in the list FASTATTN_BLOCK_M.
#include "int8_matmul/gemm_s8_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_BLOCK_M>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kBlockM = value;
    int8_matmul_s8_kernels().add(KernelKey{80, kBlockM, kDataType, /*flag=*/std::nullopt},
                                 kernel_name("int8_matmul_s8_sm80", {kBlockM, kDataType}),
                                 int8_tile_facts<Int8MatmulS8TileSm80<kBlockM>>(),
                                 launch_int8_matmul_s8_sm80<kBlockM, kDataType>);
});

}  // namespace fastattn
