// The int8 matmul with int8 activations; compiled with FASTATTN_BLOCK_M.
#include "int8_matmul/gemm_s8_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_matmul_s8_kernels().add(KernelKey{80, FASTATTN_BLOCK_M, kDataType, /*variant=*/std::nullopt},
                                 kernel_name("int8_matmul_s8_sm80", {FASTATTN_BLOCK_M, kDataType}),
                                 int8_tile_facts<Int8MatmulS8TileSm80<FASTATTN_BLOCK_M>>(),
                                 launch_int8_matmul_s8_sm80<FASTATTN_BLOCK_M, kDataType>);
});

}  // namespace fastattn
