#include "int8_matmul/grad_input_sm80.cuh"

namespace fastattn {

template void launch_int8_matmul_grad_input_sm80<48, DataType::kFloat16>(const Int8MatmulParams&, Stream);

}  // namespace fastattn
