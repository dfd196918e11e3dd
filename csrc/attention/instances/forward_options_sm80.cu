// Attention forward with options; compiled with FASTATTN_HEAD_DIM and FASTATTN_PAGED.
#include "attention/forward_options_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_forward_options_kernels().add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, FASTATTN_PAGED},
        kernel_name("attention_forward_options_sm80", {FASTATTN_HEAD_DIM, kDataType, FASTATTN_PAGED ? "paged" : ""}),
        tile_facts<ForwardOptionsTileSm80<FASTATTN_HEAD_DIM>>(),
        launch_attention_forward_options_sm80<FASTATTN_HEAD_DIM, kDataType, FASTATTN_PAGED>);
});

}  // namespace fastattn
