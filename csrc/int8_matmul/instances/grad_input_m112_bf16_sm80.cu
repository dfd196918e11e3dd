#include "int8_matmul/grad_input_sm80.cuh"

namespace fastattn {

template void launch_int8_matmul_grad_input_sm80<112, DataType::kBFloat16>(const Int8MatmulParams&, Stream);

}  // namespace fastattn
