// dK, dV and sums of dQ on large key tiles; compiled with FASTATTN_HEAD_DIM, a list.
#include "attention/backward_key_value_large_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_HEAD_DIM>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kHeadDim = value;
    attention_backward_key_value_kernels().add(
        KernelKey{80, kHeadDim, kDataType, /*flag=*/false,
                  BackwardLargeTileSm80<kHeadDim>::kFitsEverywhere ? 0 : int32_t{kSharedBytesPerCtaSm80}},
        kernel_name("attention_backward_key_value_large_sm80", {kHeadDim, kDataType}),
        tile_facts<BackwardLargeTileSm80<kHeadDim>>(),
        launch_attention_backward_key_value_large_sm80<kHeadDim, kDataType>);
});

}  // namespace fastattn
