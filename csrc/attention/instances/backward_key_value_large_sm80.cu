// dK and dV on large tiles of keys; compiled with FASTATTN_HEAD_DIM.
#include "attention/backward_key_value_large_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_key_value_kernels().add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, /*variant=*/false,
                  BackwardLargeTileSm80<FASTATTN_HEAD_DIM>::kFitsEverywhere ? 0 : int32_t{kLargeSharedBytesPerCta}},
        kernel_name("attention_backward_key_value_large_sm80", {FASTATTN_HEAD_DIM, kDataType}),
        tile_facts<BackwardLargeTileSm80<FASTATTN_HEAD_DIM>>(),
        launch_attention_backward_key_value_large_sm80<FASTATTN_HEAD_DIM, kDataType>);
});

}  // namespace fastattn
