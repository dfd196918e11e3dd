// The gradient of ALiBi slopes, summed over each row tile.
#include "attention/backward_slopes_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_slopes_kernels().add(KernelKey{80, 0, kDataType, false},
                                            kernel_name("attention_backward_slopes_sm80", {kDataType}), TileFacts{},
                                            launch_attention_backward_slopes_sm80<kDataType>);
});

}  // namespace fastattn
