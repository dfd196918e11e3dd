// Decodes 8-bit elements of a cache to pairs of 16-bit floats. The elements are exactly kFactor times the floats that
// pairs<…>(four) returns.
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/fp8.cuh"
#include "host/decode_params.h"

namespace fastattn {

// The orders in which four elements become two pairs. kNeighbours: (0, 1) and (2, 3). kEvenAndOdd: (0, 2) and (1, 3).
// The first element of a pair is the lower half.
inline constexpr uint32_t kNeighbours = 0x3210, kEvenAndOdd = 0x3120;

// kDataType: the dtype of the floats, and of the operand that they are multiplied by.
template <CacheFormat kFormat, DataType kDataType_>
struct CacheDecoding {  // 16-bit elements need no decoding
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

// fp8 is decoded to fp16 even if queries are bf16, because fp16 holds every fp8 number, and sm_89 and later have an
// instruction for this conversion.
template <DataType kDataType_>
struct CacheDecoding<CacheFormat::kFp8, kDataType_> : Fp8Decoding {
    static constexpr DataType kDataType = DataType::kFloat16;
};

}  // namespace fastattn
