// Flash-decoding; compiled with FASTATTN_HEAD_DIM and FASTATTN_CACHE, the cache's format.
#include "decode/split_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    constexpr CacheFormat kFormat = CacheFormat::FASTATTN_CACHE;
    decode_split_kernels(kFormat).add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, std::nullopt},
        kernel_name("decode_split_sm80", {std::to_string(FASTATTN_HEAD_DIM), to_string(kDataType), name_of(kFormat)}),
        tile_facts<DecodeTileSm80<FASTATTN_HEAD_DIM, is_8bit(kFormat)>>(),
        launch_decode_split_sm80<FASTATTN_HEAD_DIM, kDataType, kFormat>);
});

}  // namespace fastattn
