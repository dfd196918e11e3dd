#include "int8_matmul/gemm_sm80.cuh"

namespace fastattn {

template void launch_int8_matmul_sm80<32, DataType::kBFloat16>(const Int8MatmulParams&, Stream);

}  // namespace fastattn
