// dK and dV for Hopper with more than 128 dims; compiled with FASTATTN_HEAD_DIM and FASTATTN_VALUE_DIM.
#include "attention/backward_key_value_wide_sm90.cuh"

namespace fastattn {

static constexpr KernelSize kHeadDims(FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM);

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_key_value_kernels().add(
        KernelKey{90, kHeadDims, kDataType, /*variant=*/false},
        kernel_name("attention_backward_key_value_wide_sm90", {kHeadDims, kDataType}),
        tile_facts<BackwardWideConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM>>(),
        launch_attention_backward_key_value_wide_sm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, kDataType>);
});

}  // namespace fastattn
