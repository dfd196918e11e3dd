#include "tensor_core.h"

#include <algorithm>
#include <cmath>

namespace emulator {
namespace {

constexpr int kTile = 8;  // columns that are computed together

// Rounds towards zero. Overflow gives infinity.
inline float truncate_to_single(double x) {
    const float nearest = static_cast<float>(x);
    const double back = nearest;
    const uint32_t is_above = (std::fabs(back) > std::fabs(x)) & (std::fabs(nearest) <= 0x1.fffffep127f);
    return canonical(bit_cast<float>(bit_cast<uint32_t>(nearest) - is_above));
}

inline double power_of_two_below(double x) {  // the largest power of two up to |x|; 0 for 0
    return bit_cast<double>(bit_cast<uint64_t>(x) & 0x7ff0000000000000u);
}

template <int kRows>
void add_step(const double* a, const double* b, float* c, int columns, int depth, int step, bool is_half) {
    double sums[kRows][kTile];
    for (int row = 0; row < kRows; ++row) {
        for (int n = 0; n < kTile; ++n) sums[row][n] = c[row * columns + n];
    }
    for (int k = 0; k < step; ++k) {
        for (int row = 0; row < kRows; ++row) {
            for (int n = 0; n < kTile; ++n) sums[row][n] += a[row * depth + k] * b[k * columns + n];
        }
    }
    for (int row = 0; row < kRows; ++row) {
        float* to = c + row * columns;
        if (is_half) {
            for (int n = 0; n < kTile; ++n) to[n] = from_half(to_half(sums[row][n]));
        } else {
            for (int n = 0; n < kTile; ++n) to[n] = truncate_to_single(sums[row][n]);
        }
    }
}

void add_narrow_step(const double* a, const double* b, float* c, int columns, int step) {
    double unit[kTile], plain[kTile], sums[kTile];
    for (int n = 0; n < kTile; ++n) {
        plain[n] = c[n];
        unit[n] = power_of_two_below(plain[n]);
    }
    for (int k = 0; k < step; ++k) {
        const double power = power_of_two_below(a[k]);
        for (int n = 0; n < kTile; ++n) {
            const double most = power * power_of_two_below(b[k * columns + n]);
            unit[n] = most > unit[n] ? most : unit[n];
            plain[n] += a[k] * b[k * columns + n];
        }
    }
    double per_unit[kTile];
    for (int n = 0; n < kTile; ++n) {
        unit[n] = unit[n] == 0 ? 1 : unit[n] * 0x1p-13;
        per_unit[n] = 1 / unit[n];
        sums[n] = std::trunc(c[n] * per_unit[n]);
    }
    for (int k = 0; k < step; ++k) {
        for (int n = 0; n < kTile; ++n) sums[n] += std::trunc(a[k] * b[k * columns + n] * per_unit[n]);
    }
    for (int n = 0; n < kTile; ++n) {
        const float sum = truncate_to_single(sums[n] * unit[n]);
        const float narrow = bit_cast<float>(bit_cast<uint32_t>(sum) & ~0x3ffu);
        c[n] = std::isfinite(plain[n]) ? narrow : canonical(static_cast<float>(plain[n]));
    }
}

}  // namespace

void add_products(const double* a, const double* b, float* c, int rows, int columns, int depth, int step,
                  SumFormat format) {
    constexpr int kRows = 4;
    for (int start = 0; start < depth; start += step) {
        for (int column = 0; column < columns; column += kTile) {
            const double* const tile = b + start * columns + column;
            for (int row = 0; row < rows; row += kRows) {
                const double* const left = a + row * depth + start;
                float* const sums = c + row * columns + column;
                if (format != SumFormat::kNarrow) {
                    add_step<kRows>(left, tile, sums, columns, depth, step, format == SumFormat::kHalf);
                    continue;
                }
                for (int i = 0; i < kRows; ++i) {
                    add_narrow_step(left + i * depth, tile, sums + i * columns, columns, step);
                }
            }
        }
    }
}

void add_products(const int32_t* a, const int32_t* b, int32_t* c, int rows, int columns, int depth, bool saturates) {
    for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < columns; column += kTile) {
            int32_t products[kTile] = {};  // a sum of 32 products of 8-bit numbers cannot overflow
            for (int k = 0; k < depth; ++k) {
                for (int n = 0; n < kTile; ++n) products[n] += a[row * depth + k] * b[k * columns + column + n];
            }
            int32_t* const sums = c + row * columns + column;
            for (int n = 0; n < kTile; ++n) {
                const int64_t sum = int64_t{sums[n]} + products[n];
                const int64_t clamped = std::max<int64_t>(INT32_MIN, std::min<int64_t>(INT32_MAX, sum));
                sums[n] = static_cast<int32_t>(saturates ? clamped : sum);
            }
        }
    }
}

}  // namespace emulator
