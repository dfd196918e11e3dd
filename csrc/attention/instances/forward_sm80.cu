// Attention forward; compiled with FASTATTN_HEAD_DIM.
#include "attention/forward_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_forward_kernels().add(KernelKey{80, FASTATTN_HEAD_DIM, kDataType, false},
                                    kernel_name("attention_forward_sm80", {FASTATTN_HEAD_DIM, kDataType}),
                                    tile_facts<ForwardTileSm80<FASTATTN_HEAD_DIM>>(),
                                    launch_attention_forward_sm80<FASTATTN_HEAD_DIM, kDataType>);
});

}  // namespace fastattn
