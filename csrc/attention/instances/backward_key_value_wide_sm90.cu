// dK, dV and sums of dQ for Hopper with more than 128 dims; compiled with FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM and
// FASTATTN_OPTIONS.
#include "attention/backward_key_value_wide_sm90.cuh"

namespace fastattn {

static constexpr KernelSize kHeadDims(FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM);

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_backward_key_value_kernels().add(
        KernelKey{90, kHeadDims, kDataType, FASTATTN_OPTIONS},
        kernel_name("attention_backward_key_value_wide_sm90",
                    {kHeadDims, kDataType, FASTATTN_OPTIONS ? "options" : ""}),
        tile_facts<BackwardWideConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, FASTATTN_OPTIONS>>(),
        launch_attention_backward_key_value_wide_sm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, kDataType,
                                                      FASTATTN_OPTIONS>);
});

}  // namespace fastattn
