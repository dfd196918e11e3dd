// dK, dV and sums of dQ; compiled with FASTATTN_HEAD_DIM and FASTATTN_OPTIONS.
#include "attention/backward_key_value_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_key_value_kernels().add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, FASTATTN_OPTIONS},
        kernel_name("attention_backward_key_value_sm80",
                    {FASTATTN_HEAD_DIM, kDataType, FASTATTN_OPTIONS ? "options" : "plain"}),
        tile_facts<BackwardTileSm80<FASTATTN_HEAD_DIM>>(),
        launch_attention_backward_key_value_sm80<FASTATTN_HEAD_DIM, kDataType, FASTATTN_OPTIONS>);
});

}  // namespace fastattn
