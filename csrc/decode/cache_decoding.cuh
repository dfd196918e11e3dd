// Decodes 8-bit elements of a cache to pairs of 16-bit floats, exactly but for a factor: the elements are kFactor times
// what pairs<…>(four) returns.
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/fp8.cuh"
#include "host/decode_params.h"

namespace fastattn {

// Four elements as two pairs, the lower halves first: 0 and 1, 2 and 3, or 0 and 2, 1 and 3.
inline constexpr uint32_t kNeighbours = 0x3210, kEvenAndOdd = 0x3120;

// kDataType: of the floats, and of what they are multiplied by.
template <CacheFormat kFormat, DataType kDataType_>
struct CacheDecoding {  // of 16 bits: there is nothing to do
    static constexpr DataType kDataType = kDataType_;
    static constexpr float kFactor = 1.0f;
};

template <DataType kDataType_>
struct CacheDecoding<CacheFormat::kInt8, kDataType_> {
    static constexpr DataType kDataType = kDataType_;
    static constexpr float kFactor = Int8Decoding<kDataType>::kFactor;

    template <uint32_t kOrder>
    FASTATTN_DEVICE static uint2 pairs(uint32_t four) {
        const uint32_t four_biased = biased(four);
        return {decode_pair<kDataType, (kOrder & 3), (kOrder >> 4 & 3)>(four_biased),
                decode_pair<kDataType, (kOrder >> 8 & 3), (kOrder >> 12 & 3)>(four_biased)};
    }
};

// fp16 has every fp8 number, and the instruction for it.
template <DataType kDataType_>
struct CacheDecoding<CacheFormat::kFp8, kDataType_> : Fp8Decoding {
    static constexpr DataType kDataType = DataType::kFloat16;
};

}  // namespace fastattn
