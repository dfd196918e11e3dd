// Converts int8 numbers to pairs of 16-bit floats, in registers and exactly. A pair takes a byte permutation and a
// fused multiply-add, and shares an exclusive or with another pair.
//
// The exclusive or turns a number w into b = w + 128, from 0 to 255. The permutation puts b into the low byte of a
// 16-bit float whose high byte makes the float's value linear in b. The multiply-add removes the offset:
//
//   fp16   0x64bb = 1024 + b         * 1       - 1152   = w
//   bf16   0x00bb = b * 2^-133       * 2^127   - 2      = w / 64
//
// bf16's mantissa has seven bits, but b has eight. All eight fit because bf16's subnormal numbers and the numbers with
// the smallest normal exponent, 0x0000 to 0x00ff together, are evenly spaced.
#pragma once

#include <cstdint>

#include "device/ptx/fma.cuh"
#include "host/params.h"

namespace fastattn {

template <DataType kDataType>
struct Int8Decoding;

template <>
struct Int8Decoding<DataType::kFloat16> {
    static constexpr uint32_t kHighBytes = 0x64646464;
    static constexpr uint32_t kMultiplier = 0x3c003c00;  // 1
    static constexpr uint32_t kOffset = 0xe480e480;      // -1152
    static constexpr float kFactor = 1.0f;               // int8 number = decoded number * kFactor
};

template <>
struct Int8Decoding<DataType::kBFloat16> {
    static constexpr uint32_t kHighBytes = 0;
    static constexpr uint32_t kMultiplier = 0x7f007f00;  // 2^127
    static constexpr uint32_t kOffset = 0xc000c000;      // -2
    static constexpr float kFactor = 64.0f;
};

template <DataType kDataType>
FASTATTN_DEVICE uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
    return kDataType == DataType::kFloat16 ? ptx::fma_rn_f16x2(a, b, c) : ptx::fma_rn_bf16x2(a, b, c);
}

// Returns four int8 numbers w as w + 128.
FASTATTN_DEVICE uint32_t biased(uint32_t four) {
    return four ^ 0x80808080;
}

// Returns bytes kFirst and kSecond of four biased numbers as a pair of floats that are linear in them. The first is the
// lower half of the pair.
template <DataType kDataType, int kFirst, int kSecond>
FASTATTN_DEVICE uint32_t linear_pair(uint32_t four_biased) {
    constexpr uint32_t kHighByte = 4;  // __byte_perm's index of a byte of its second operand
    constexpr uint32_t kSelector = kFirst | kHighByte << 4 | kSecond << 8 | kHighByte << 12;
    return __byte_perm(four_biased, Int8Decoding<kDataType>::kHighBytes, kSelector);
}

template <DataType kDataType, int kFirst, int kSecond>
FASTATTN_DEVICE uint32_t decode_pair(uint32_t four_biased) {
    using Decoding = Int8Decoding<kDataType>;
    const uint32_t linear = linear_pair<kDataType, kFirst, kSecond>(four_biased);
    return fma_pairs<kDataType>(linear, Decoding::kMultiplier, Decoding::kOffset);
}

// Multiplies two pairs of numbers. Rounds to nearest even.
template <DataType kDataType>
FASTATTN_DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    constexpr uint32_t kMinusZero = 0x80008000;  // adding it changes no product, not even -0
    return fma_pairs<kDataType>(a, b, kMinusZero);
}

}  // namespace fastattn
