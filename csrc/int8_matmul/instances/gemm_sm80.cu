// The int8 matmul; compiled with FASTATTN_BLOCK_M.
#include "int8_matmul/gemm_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    int8_matmul_kernels().add(KernelKey{80, FASTATTN_BLOCK_M, kDataType, /*variant=*/std::nullopt},
                              kernel_name("int8_matmul_sm80", {FASTATTN_BLOCK_M, kDataType}),
                              int8_tile_facts<Int8MatmulTileSm80<FASTATTN_BLOCK_M>>(),
                              launch_int8_matmul_sm80<FASTATTN_BLOCK_M, kDataType>);
});

}  // namespace fastattn
