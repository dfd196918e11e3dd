// The arithmetic of tensor cores: the numbers that operands hold, and the rounding of sums of products.
#pragma once

#include <cstdint>
#include <cstring>

#include "../types.h"
#include "floating.h"

namespace emulator {

// Operand formats. `get` reads the element at `index` of a row of contiguous elements in memory or in a register.
struct Fp16 {
    static constexpr int kBytes = 2;
    static double get(const void* at, int index) {
        uint16_t bits;
        std::memcpy(&bits, static_cast<const char*>(at) + 2 * index, 2);
        return from_half(bits);
    }
};
struct Bf16 {
    static constexpr int kBytes = 2;
    static double get(const void* at, int index) {
        uint16_t bits;
        std::memcpy(&bits, static_cast<const char*>(at) + 2 * index, 2);
        return from_bfloat(bits);
    }
};
struct Tf32 {
    static constexpr int kBytes = 4;
    static double get(const void* at, int index) {
        uint32_t bits;
        std::memcpy(&bits, static_cast<const char*>(at) + 4 * index, 4);
        return bit_cast<float>(bits & ~0x1fffu);  // hardware ignores the low 13 bits
    }
};
struct E4m3 {
    static constexpr int kBytes = 1;
    static double get(const void* at, int index) { return from_e4m3(static_cast<const uint8_t*>(at)[index]); }
};
struct E5m2 {
    static constexpr int kBytes = 1;
    static double get(const void* at, int index) { return from_e5m2(static_cast<const uint8_t*>(at)[index]); }
};
struct Signed8 {
    static constexpr int kBytes = 1;
    static int32_t get(const void* at, int index) { return static_cast<const int8_t*>(at)[index]; }
};
struct Unsigned8 {
    static constexpr int kBytes = 1;
    static int32_t get(const void* at, int index) { return static_cast<const uint8_t*>(at)[index]; }
};

// Calls function(format) with the format of a floating-point operand's type.
template <typename Function>
auto with_float_format(Type type, Function&& function) {
    switch (type) {
        case Type::kF16:
            return function(Fp16{});
        case Type::kBF16:
            return function(Bf16{});
        case Type::kTF32:
            return function(Tf32{});
        case Type::kE4M3:
            return function(E4m3{});
        default:
            return function(E5m2{});
    }
}

enum class SumFormat : uint8_t {
    kSingle,
    kHalf,
    kNarrow,  // fp32 whose lowest 10 mantissa bits are 0
};

// Computes c += a b. Matrices are row-major: a is [rows, depth], b [depth, columns], c [rows, columns]. `columns` is a
// multiple of 8. Each step adds `step` products and the accumulator.
//
// Products are exact. The sum of a step is formed in double precision, which is exact unless exponents are far apart.
// It is then truncated to fp32 (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"),
// or rounded to nearest fp16.
//
// kNarrow is Hopper's arithmetic for fp8: all terms of a step are truncated to multiples of 2^-13 times the largest
// power of two among them, and the sum is truncated to 13 bits after the leading one.
void add_products(const double* a, const double* b, float* c, int rows, int columns, int depth, int step,
                  SumFormat format);

// Does the same with integers. Sums wrap around, or saturate.
void add_products(const int32_t* a, const int32_t* b, int32_t* c, int rows, int columns, int depth, bool saturates);

}  // namespace emulator
