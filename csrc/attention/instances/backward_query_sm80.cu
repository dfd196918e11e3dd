// dQ from its sums; compiled with FASTATTN_HEAD_DIM, a list.
#include "attention/backward_query_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_HEAD_DIM>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kHeadDim = value;
    attention_backward_query_kernels().add(KernelKey{80, kHeadDim, kDataType, false},
                                           kernel_name("attention_backward_query_sm80", {kHeadDim, kDataType}),
                                           TileFacts{}, launch_attention_backward_query_sm80<kHeadDim, kDataType>);
});

}  // namespace fastattn
