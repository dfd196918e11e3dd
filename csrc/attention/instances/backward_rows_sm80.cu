// delta, shift and log2_sum of each row.
#include "attention/backward_rows_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_rows_kernels().add(KernelKey{80, 0, kDataType, false},
                                          kernel_name("attention_backward_rows_sm80", {kDataType}), TileFacts{},
                                          launch_attention_backward_rows_sm80<kDataType>);
});

}  // namespace fastattn
