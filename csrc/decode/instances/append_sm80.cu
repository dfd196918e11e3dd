// The append by slots; compiled with FASTATTN_HEAD_DIM and FASTATTN_CACHE, the cache's format.
#include "decode/append_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    constexpr CacheFormat kFormat = CacheFormat::FASTATTN_CACHE;
    decode_append_kernels(kFormat).add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, std::nullopt},
        kernel_name("decode_append_sm80", {FASTATTN_HEAD_DIM, kDataType, name_of(kFormat)}), TileFacts{},
        launch_decode_append_sm80<FASTATTN_HEAD_DIM, kDataType, kFormat>);
});

}  // namespace fastattn
