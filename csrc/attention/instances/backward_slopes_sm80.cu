// The gradient of ALiBi slopes, of each tile of rows; compiled with FASTATTN_DTYPE.
#include "attention/backward_slopes_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_backward_slopes_kernels(),
                                       KernelKey{80, 0, DataType::FASTATTN_DTYPE, false},
                                       kernel_name("attention_backward_slopes_sm80",
                                                   {to_string(DataType::FASTATTN_DTYPE)}),
                                       TileFacts{}, launch_attention_backward_slopes_sm80<DataType::FASTATTN_DTYPE>);

}  // namespace fastattn
