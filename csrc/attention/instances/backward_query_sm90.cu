// dQ for Hopper; compiled with FASTATTN_HEAD_DIM.
#include "attention/backward_query_sm90.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_query_kernels().add(KernelKey{90, FASTATTN_HEAD_DIM, kDataType, false},
                                           kernel_name("attention_backward_query_sm90", {FASTATTN_HEAD_DIM, kDataType}),
                                           TileFacts{},
                                           launch_attention_backward_query_sm90<FASTATTN_HEAD_DIM, kDataType>);
});

}  // namespace fastattn
