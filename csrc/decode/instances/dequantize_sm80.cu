// Instantiates the dequantisation of caches of the format FASTATTN_CACHE.
#include "decode/dequantize_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    constexpr CacheFormat kFormat = CacheFormat::FASTATTN_CACHE;
    decode_dequantize_kernels(kFormat).add(KernelKey{80, 0, kDataType, std::nullopt},
                                           kernel_name("decode_dequantize_sm80", {kDataType, name_of(kFormat)}),
                                           TileFacts{}, launch_decode_dequantize_sm80<kDataType, kFormat>);
});

}  // namespace fastattn
