// dQ, and dK and dV of split key tiles, from their sums for Hopper; compiled with FASTATTN_HEAD_DIM, a list.
#include "attention/backward_query_sm90.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_HEAD_DIM>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kHeadDim = value;
    attention_backward_query_kernels().add(KernelKey{90, kHeadDim, kDataType, false},
                                           kernel_name("attention_backward_query_sm90", {kHeadDim, kDataType}),
                                           TileFacts{}, launch_attention_backward_query_sm90<kHeadDim, kDataType>);
});

}  // namespace fastattn
