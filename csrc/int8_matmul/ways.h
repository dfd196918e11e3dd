// The ways in which a matmul with int8 weights can be computed, and how long each is predicted to take: by one of our kernels,
// or by dequantising blocks of weights for cuBLAS, whose matmuls of 16-bit numbers are the faster the less a GPU's own code
// here is made for it. Predictions choose; nothing here is measured. Clocks are those of an SM.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "host/sm_rates.h"
#include "int8_matmul/work.h"

namespace fastattn {

// Of dequantised weights, 16 bits each.
inline constexpr int64_t kDequantisedElements = int64_t{32} << 20;  // 64 MB
inline constexpr int32_t kDequantisedRowMultiple = 16;              // elements; what is behind a row pads it
inline constexpr int32_t kBlockMultiple = 256;                      // of the rows or columns of a block

// Elements from one dequantised row to the next.
inline int64_t dequantised_stride(int32_t columns) {
    return (int64_t{columns} + kDequantisedRowMultiple - 1) / kDequantisedRowMultiple * kDequantisedRowMultiple;
}

// Rows (or columns) of the weights that are dequantised at a time where each has so many elements; 0: not even a few fit.
// Either may be padded.
inline int32_t dequantised_block(int32_t count, int32_t elements) {
    const int64_t fitting = kDequantisedElements / std::max<int64_t>(dequantised_stride(elements), 1);
    if (fitting >= dequantised_stride(count)) return count;
    return static_cast<int32_t>(fitting / kBlockMultiple * kBlockMultiple);
}

inline constexpr double kLaunchClocks = 4000;  // of a kernel, and its first and last loads: an assumption

// A matmul of 16-bit numbers by cuBLAS: sums [tokens, outputs], each of `depth`. It is taken to choose the best of a few tiles and
// of a few parts into which it cuts sums; parts are added up by a second kernel.
inline double cublas_clocks(int32_t tokens, int32_t outputs, int32_t depth, const SmRates& rates, int32_t num_sms) {
    struct Tile {
        int32_t tokens, outputs;
        double reached;  // of the largest one's rate: what smaller ones load for their products is an assumption
    };
    constexpr Tile kTiles[] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.9}, {64, 256, 0.9}, {64, 128, 0.75}};
    const double gpu_bytes = rates.dram_bytes * num_sms, results = static_cast<double>(tokens) * outputs;
    const double operands = static_cast<double>(depth) * (static_cast<double>(tokens) + outputs);
    double best = std::numeric_limits<double>::infinity();
    for (const Tile& tile : kTiles) {
        const double tiles =
            std::ceil(double{1} * tokens / tile.tokens) * std::ceil(double{1} * outputs / tile.outputs);
        for (int32_t parts = 1; parts <= 8; parts *= 2) {
            const double waves = std::ceil(tiles * parts / num_sms);
            const double products = waves * tile.tokens * tile.outputs * (double{1} * depth / parts) /
                                    (tile.reached * rates.cublas_macs_16bit);
            const double of_parts = parts == 1 ? 0 : kLaunchClocks + 8.0 * parts * results / gpu_bytes;
            best =
                std::min(best, kLaunchClocks + of_parts + std::max(products, 2.0 * (operands + results) / gpu_bytes));
        }
    }
    return best;
}

// The same of weights that are dequantised for it, block by block: reads a byte of each, and writes two.
inline double dequantised_clocks(int32_t tokens, int32_t outputs, int32_t depth, const SmRates& rates,
                                 int32_t num_sms) {
    const int32_t block = dequantised_block(outputs, depth);
    if (block == 0) return std::numeric_limits<double>::infinity();
    const auto of_block = [&](int32_t columns) {
        const double written = kLaunchClocks + 3.0 * columns * depth / (rates.dram_bytes * num_sms);
        return written + cublas_clocks(tokens, columns, depth, rates, num_sms);
    };
    const int32_t last = outputs % block;
    return outputs / block * of_block(block) + (last > 0 ? of_block(last) : 0);
}

// The sums of all tokens, [tokens, columns], by a kernel of its own: the gradient of a bias beside such a matmul. Our kernels
// add the tokens up on their way.
inline double token_sum_clocks(int32_t tokens, int32_t columns, const SmRates& rates, int32_t num_sms) {
    return kLaunchClocks + 2.0 * tokens * columns / (rates.dram_bytes * num_sms);
}

}  // namespace fastattn
