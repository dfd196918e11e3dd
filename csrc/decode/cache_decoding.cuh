// Elements of 8 bits of a cache as pairs of 16-bit floats, exactly but for a factor: four at a time, kFactor times what
// pair<…>(spread(four)) gives is what the cache holds.
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/fp8.cuh"
#include "host/decode_params.h"

namespace fastattn {

template <CacheFormat kFormat, DataType kDataType_>
struct CacheDecoding {  // of 16 bits: there is nothing to do
    static constexpr float kFactor = 1.0f;
};

template <DataType kDataType_>
struct CacheDecoding<CacheFormat::kInt8, kDataType_> {
    static constexpr DataType kDataType = kDataType_;
    static constexpr float kFactor = Int8Decoding<kDataType>::kFactor;

    __device__ __forceinline__ static uint32_t spread(uint32_t four) { return biased(four); }

    // Of two of the four; the first becomes the lower half of the pair.
    template <int kFirst, int kSecond>
    __device__ __forceinline__ static uint32_t pair(uint32_t four) {
        return decode_pair<kDataType, kFirst, kSecond>(four);
    }
};

template <DataType kDataType_>
struct CacheDecoding<CacheFormat::kFp8, kDataType_> {
    static constexpr DataType kDataType = kDataType_;
    static constexpr float kFactor = Fp8Decoding<kDataType>::kFactor;

    __device__ __forceinline__ static SpreadFp8 spread(uint32_t four) { return spread_fp8<kDataType>(four); }

    template <int kFirst, int kSecond>
    __device__ __forceinline__ static uint32_t pair(const SpreadFp8& four) {
        return decode_fp8_pair<kDataType, kFirst, kSecond>(four);
    }
};

}  // namespace fastattn
