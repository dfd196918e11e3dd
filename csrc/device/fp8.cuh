// Converts fp8 numbers (e4m3 without infinities: a sign, four bits of exponent with the bias 7, three of mantissa;
// magnitude 0x7f is NaN) to pairs of fp16 numbers, in registers and exactly. Also rounds fp32 numbers to fp8.
//
// GPUs from sm_89 on have an instruction for the conversion. On earlier GPUs, exponent and mantissa move to the lowest
// exponent bits and the highest mantissa bits of an fp16 number. The result is the fp8 number times 2^(7 - 15), also
// for subnormal numbers, but NaN becomes finite. To restore NaN, the result is multiplied by 1.125 * 2^15, which gives
// infinity only for magnitude 0x7f. Zero times this product is then added to the result, and zero times infinity is
// NaN:
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
    static constexpr float kFactor = 1.0f;  // fp8 number = decoded number * kFactor

    // Decodes four numbers into two pairs. The hex digits of kOrder, the lowest digit first, are the byte indices of
    // the decoded numbers.
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
    // Returns two of four fp16 numbers, whose upper and lower bytes are in `upper` and `lower`. kBytes: their indices,
    // a hexadecimal digit each.
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

// Returns a word in which a byte has its highest bit set if the same byte of `four` is NaN.
FASTATTN_DEVICE uint32_t nan_bits_of_fp8(uint32_t four) {
    return ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

// Converts to fp8. Rounds to nearest even. Magnitudes above 448, infinity too, become 448. NaN stays NaN.
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
