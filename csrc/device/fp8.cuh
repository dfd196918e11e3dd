// Converts fp8 numbers (e4m3 without infinities: a sign, four bits of exponent with the bias 7, three of mantissa;
// magnitude 0x7f is NaN) to pairs of fp16 numbers, in registers and exactly, and back.
//
// From sm_89 on, an instruction does it. Earlier GPUs move exponent and mantissa to the lowest bits of fp16's exponent
// and the highest of its mantissa. That gives the number times 2^(7 - 15), also for subnormal numbers. Only NaN is
// missing: a multiplication by 1.125 * 2^15 makes infinity of magnitude 0x7f alone, and infinity times zero, which is
// added, is NaN:
//
//   0x7e = 448 → 1.75   * 1.125 * 2^15 = 64512           0x7f → 1.875   * 1.125 * 2^15 = inf
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/ptx/cvt.cuh"
#include "host/params.h"

namespace fastattn {

inline constexpr float kLargestFp8 = 448.0f;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

struct Fp8Decoding {
    static constexpr float kFactor = 1.0f;  // a decoded number times this is the fp8 one

    // Returns four numbers as two pairs. kOrder: the indices of their bytes, the lowest digit first.
    template <uint32_t kOrder>
    FASTATTN_DEVICE static uint2 pairs(uint32_t four) {
        constexpr uint32_t kAsTheyAre = 0x3210;
        return ptx::cvt_rn_f16x2_e4m3x2(kOrder == kAsTheyAre ? four : __byte_perm(four, 0, kOrder));
    }
};

#else

struct Fp8Decoding {
    static constexpr float kFactor = 256.0f;

    template <uint32_t kOrder>
    FASTATTN_DEVICE static uint2 pairs(uint32_t four) {
        const uint32_t upper = (four & 0x80808080) | (four >> 1 & 0x3f3f3f3f), lower = four << 7 & 0x80808080;
        return {pair<kOrder & 0xff>(upper, lower), pair<(kOrder >> 8)>(upper, lower)};
    }

  private:
    // Makes a pair from the upper and lower bytes of two of four fp16 numbers.
    template <uint32_t kBytes>
    FASTATTN_DEVICE static uint32_t pair(uint32_t upper, uint32_t lower) {
        constexpr uint32_t kFirst = kBytes & 0xf, kSecond = kBytes >> 4;
        constexpr uint32_t kPastLargest = 0x78807880;  // 1.125 * 2^15
        const uint32_t bits =
            __byte_perm(lower, upper, kFirst | (kFirst + 4) << 4 | kSecond << 8 | (kSecond + 4) << 12);
        return fma_pairs<kFloat16>(multiply_pairs<kFloat16>(bits, kPastLargest), 0, bits);
    }

    static constexpr DataType kFloat16 = DataType::kFloat16;
};

#endif

// Returns a word with the highest bit set in the byte of each of four numbers that is NaN.
FASTATTN_DEVICE uint32_t nan_bits_of_fp8(uint32_t four) {
    return ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

// Rounds to nearest even. Numbers beyond the largest, infinity too, become the largest. NaN stays NaN.
FASTATTN_DEVICE uint32_t encode_fp8(float value) {
    constexpr float kLeastNormal = 0x1p-6f, kUnitIsLeastSubnormal = 0x1p14f;
    constexpr uint32_t kBiases = (127 - 7) << 3;
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    if (value != value) return sign | 0x7f;
    const float magnitude = fminf(fabsf(value), kLargestFp8);
    if (magnitude < kLeastNormal) {  // a unit in the last place of the sum is the least subnormal number
        return sign | (__float_as_uint(magnitude + kUnitIsLeastSubnormal) - __float_as_uint(kUnitIsLeastSubnormal));
    }
    const uint32_t bits = __float_as_uint(magnitude);
    return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - kBiases);
}

}  // namespace fastattn
