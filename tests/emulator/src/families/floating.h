// Floating-point formats of 16 bits and less, and rounding into them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

template <typename To, typename From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float canonical(float x) {
    return x != x ? bit_cast<float>(0x7fffffffu) : x;
}

inline float flush(float x) {  // .ftz: subnormals become zeros of their sign
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

inline float from_half(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    const float finite = bit_cast<float>(rest << 13) * 0x1p112f;
    const uint32_t bits = rest >= 0x7c00u ? 0x7f800000u | rest << 13 : bit_cast<uint32_t>(finite);
    return bit_cast<float>(bits | sign);
}

inline float from_e4m3(uint8_t b) {  // e4m3 has no infinities, and one NaN of each sign
    const float finite = bit_cast<float>(uint32_t{b & 0x7fu} << 20) * 0x1p120f;
    return (b & 0x7f) == 0x7f ? bit_cast<float>(0x7fffffffu) : (b & 0x80) != 0 ? -finite : finite;
}

inline float from_e5m2(uint8_t b) {
    return from_half(static_cast<uint16_t>(b << 8));
}

inline float from_bfloat(uint16_t b) {
    return bit_cast<float>(uint32_t{b} << 16);
}

enum class Rounding : uint8_t { kNearestEven, kZero, kDown, kUp, kNearestAway };

// A binary floating-point format: the numbers of explicit mantissa bits and of exponent bits.
struct Format {
    int mantissa_bits, exponent_bits;
    bool has_infinity = true;  // false: the largest exponent has finite numbers too
    constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    constexpr uint32_t nan() const { return (1u << (mantissa_bits + exponent_bits)) - 1; }
    constexpr uint32_t largest() const {
        return has_infinity ? (nan() >> mantissa_bits << mantissa_bits) - 1 : nan() - 1;
    }
};
constexpr Format kHalf{10, 5}, kBfloat{7, 8}, kTf32{10, 8}, kSingle{23, 8}, kE4m3{3, 4, false}, kE5m2{2, 5};

// Rounds a value to a format and returns the format's bits. NaN becomes the canonical NaN. Overflow gives infinity (NaN
// if the format has none), or the largest finite number with `saturate` or with rounding towards zero.
uint32_t encode(double value, Format format, Rounding rounding, bool saturate = false);

inline uint16_t to_half(double value) {
    return static_cast<uint16_t>(encode(value, kHalf, Rounding::kNearestEven));
}
inline uint16_t to_bfloat(double value) {
    return static_cast<uint16_t>(encode(value, kBfloat, Rounding::kNearestEven));
}

// Returns a * b + c rounded to odd, so that a second rounding to half the precision is correct. a * b must be exact.
inline double multiply_add_to_odd(double a, double b, double c) {
    const double product = a * b, sum = product + c;
    if (!std::isfinite(sum)) return sum;
    const double back = sum - product;
    const double error = (product - (sum - back)) + (c - back);
    uint64_t bits = bit_cast<uint64_t>(sum);
    if (error != 0 && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return bit_cast<double>(bits);
}

}  // namespace emulator
