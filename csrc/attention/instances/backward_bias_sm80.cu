// The gradient of a bias.
#include "attention/backward_bias_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_bias_kernels().add(KernelKey{80, 0, kDataType, false},
                                          kernel_name("attention_backward_bias_sm80", {kDataType}), TileFacts{},
                                          launch_attention_backward_bias_sm80<kDataType>);
});

}  // namespace fastattn
