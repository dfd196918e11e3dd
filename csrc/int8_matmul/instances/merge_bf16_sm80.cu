#include "int8_matmul/merge_sm80.cuh"

namespace fastattn {

template void launch_int8_matmul_merge_sm80<DataType::kBFloat16>(const MatmulEpilogue&, Stream);

}  // namespace fastattn
