// Attention forward for Hopper; compiled with FASTATTN_HEAD_DIM and FASTATTN_VALUE_DIM.
#include "attention/forward_sm90.cuh"

namespace fastattn {

static constexpr KernelSize kHeadDims(FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM);

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    attention_forward_kernels().add(KernelKey{90, kHeadDims, kDataType, /*flag=*/std::nullopt},
                                    kernel_name("attention_forward_sm90", {kHeadDims, kDataType}),
                                    tile_facts<ForwardConfigSm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM>>(),
                                    launch_attention_forward_sm90<FASTATTN_HEAD_DIM, FASTATTN_VALUE_DIM, kDataType>);
});

}  // namespace fastattn
