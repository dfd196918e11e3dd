// fp8 numbers (e4m3 without infinities: a sign, four bits of exponent with the bias 7, three of mantissa; magnitude 0x7f is
// NaN) as pairs of 16-bit floats, in registers and exactly, and back.
//
// The bits of a number, exponent and mantissa moved to where a 16-bit float has the lowest bits of its exponent and the
// highest of its mantissa, are that number times a power of two, 2^(7 - bias): subnormal numbers too. Of bf16 that is
// 2^-120, which a multiplication takes away. A second one, by 1.125 times a power of two, is exact and would lead past
// what the format holds for magnitude 0x7f alone, infinity, and infinity times zero is the NaN that is added:
//
//   magnitude    0x7e = 448    0x7f
//   fp16         1.75          1.875      * 1.125 * 2^15  = 64512           inf
//   bf16         448           480        * 1.125 * 2^119 = 1.97 * 2^127    inf
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "host/params.h"

namespace fastattn {

inline constexpr float kLargestFp8 = 448.0f;

template <DataType kDataType>
struct Fp8Decoding;

template <>
struct Fp8Decoding<DataType::kFloat16> {
    static constexpr int kShift = 1;                      // of exponent and mantissa to the right
    static constexpr uint32_t kPastLargest = 0x78807880;  // 1.125 * 2^15
    static constexpr float kFactor = 256.0f;              // a decoded number times this is the fp8 one
};

template <>
struct Fp8Decoding<DataType::kBFloat16> {
    static constexpr int kShift = 4;
    static constexpr uint32_t kPowerLost = 0x7b807b80;    // 2^120
    static constexpr uint32_t kPastLargest = 0x7b107b10;  // 1.125 * 2^119
    static constexpr float kFactor = 1.0f;
};

// Four numbers, as the upper and the lower bytes of what they are as 16-bit floats.
struct SpreadFp8 {
    uint32_t upper, lower;
};

template <DataType kDataType>
__device__ __forceinline__ SpreadFp8 spread_fp8(uint32_t four) {
    constexpr int kShift = Fp8Decoding<kDataType>::kShift;
    constexpr uint32_t kInEachByte = 0x01010101;
    constexpr uint32_t kUpper = (0x7f >> kShift) * kInEachByte, kLower = (0xff << (8 - kShift) & 0xff) * kInEachByte;
    return {(four & 0x80808080) | (four >> kShift & kUpper), four << (8 - kShift) & kLower};
}

// Two of four numbers; the first becomes the lower half of the pair.
template <DataType kDataType, int kFirst, int kSecond>
__device__ __forceinline__ uint32_t decode_fp8_pair(const SpreadFp8& four) {
    using Decoding = Fp8Decoding<kDataType>;
    constexpr uint32_t kSelector = kFirst | (kFirst + 4) << 4 | kSecond << 8 | (kSecond + 4) << 12;
    uint32_t pair = __byte_perm(four.lower, four.upper, kSelector);
    if constexpr (kDataType == DataType::kBFloat16) pair = multiply_pairs<kDataType>(pair, Decoding::kPowerLost);
    return fma_pairs<kDataType>(multiply_pairs<kDataType>(pair, Decoding::kPastLargest), 0, pair);
}

// The highest bit of each of four numbers that is NaN.
__device__ __forceinline__ uint32_t nan_bits_of_fp8(uint32_t four) {
    return ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

// Rounded to nearest even; what is larger than the largest number becomes that, infinity too. NaN stays NaN.
__device__ __forceinline__ uint32_t encode_fp8(float value) {
    constexpr float kLeastNormal = 0x1p-6f, kUnitIsLeastSubnormal = 0x1p14f;
    constexpr uint32_t kBiases = (127 - 7) << 3;
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    if (value != value) return sign | 0x7f;
    const float magnitude = fminf(fabsf(value), kLargestFp8);
    if (magnitude < kLeastNormal) {  // the sum has one unit in the last place for each least subnormal number
        return sign | (__float_as_uint(magnitude + kUnitIsLeastSubnormal) - __float_as_uint(kUnitIsLeastSubnormal));
    }
    const uint32_t bits = __float_as_uint(magnitude);
    return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - kBiases);
}

}  // namespace fastattn
