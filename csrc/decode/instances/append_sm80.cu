// Instantiates the append to slots, for the list FASTATTN_HEAD_DIM and the cache format FASTATTN_CACHE.
#include "decode/append_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_HEAD_DIM>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kHeadDim = value;
    constexpr CacheFormat kFormat = CacheFormat::FASTATTN_CACHE;
    decode_append_kernels(kFormat).add(KernelKey{80, kHeadDim, kDataType, std::nullopt},
                                       kernel_name("decode_append_sm80", {kHeadDim, kDataType, name_of(kFormat)}),
                                       TileFacts{}, launch_decode_append_sm80<kHeadDim, kDataType, kFormat>);
});

}  // namespace fastattn
