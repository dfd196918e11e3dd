#include "int8_matmul/gemm_s8_sm80.cuh"

namespace fastattn {

template void launch_int8_matmul_s8_sm80<64, DataType::kBFloat16>(const Int8MatmulParams&, Stream);

}  // namespace fastattn
