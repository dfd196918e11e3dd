// Attention forward; compiled with FASTATTN_HEAD_DIM and FASTATTN_FEW_KEYS.
#include "attention/forward_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    constexpr bool kFewKeys = FASTATTN_FEW_KEYS;
    // At 128 dims, two CTAs fit on an SM only on GPUs where a CTA can have this much.
    constexpr int32_t kSharedBytes = FASTATTN_HEAD_DIM == 128 && !kFewKeys ? kSharedBytesPerCtaSm80 : 0;
    attention_forward_kernels().add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, /*flag=*/false, kSharedBytes},
        kernel_name("attention_forward_sm80", {FASTATTN_HEAD_DIM, kDataType, kFewKeys ? "few keys" : ""}),
        tile_facts<ForwardTileSm80<FASTATTN_HEAD_DIM, kFewKeys>>(),
        launch_attention_forward_sm80<FASTATTN_HEAD_DIM, kDataType, kFewKeys>);
});

}  // namespace fastattn
