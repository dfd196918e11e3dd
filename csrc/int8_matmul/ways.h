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
inline constexpr int32_t kBlockMultiple = 256;                      // of the rows or columns of a block

// Rows (or columns) of the weights that are dequantised at a time where each has so many elements; 0: not even a few fit.
inline int32_t dequantised_block(int32_t count, int32_t elements) {
    const int64_t fitting = kDequantisedElements / std::max(elements, 1);
    if (fitting >= count) return count;
    return static_cast<int32_t>(fitting / kBlockMultiple * kBlockMultiple);
}

// A matmul of 16-bit numbers by cuBLAS: sums [tokens, outputs], each of `depth`. It is taken to choose the best of a few tiles and
// of a few parts into which it cuts sums; parts are added up by a second kernel.
inline double cublas_clocks(int32_t tokens, int32_t outputs, int32_t depth, const SmRates& rates, int32_t num_sms) {
    struct Tile {
        int32_t tokens, outputs;
        double reached;  // of the largest one's rate: what smaller ones load for their products is an assumption
    };
    constexpr Tile kTiles[] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.9}, {64, 256, 0.9}, {64, 128, 0.75}};
    constexpr double kLaunch = 4000;  // of a kernel, and its first and last loads: an assumption
    const double gpu_bytes = rates.dram_bytes * num_sms, results = static_cast<double>(tokens) * outputs;
    const double operands = static_cast<double>(depth) * (static_cast<double>(tokens) + outputs);
    double best = std::numeric_limits<double>::infinity();
    for (const Tile& tile : kTiles) {
        const double tiles =
            std::ceil(double{1} * tokens / tile.tokens) * std::ceil(double{1} * outputs / tile.outputs);
        for (int32_t parts = 1; parts <= 8; parts *= 2) {
            const double waves = std::ceil(tiles * parts / num_sms);
            const double products =
                waves * tile.tokens * tile.outputs * (depth / parts) / (tile.reached * rates.cublas_macs_16bit);
            const double of_parts = parts == 1 ? 0 : kLaunch + 8.0 * parts * results / gpu_bytes;
            best = std::min(best, kLaunch + of_parts + std::max(products, 2.0 * (operands + results) / gpu_bytes));
        }
    }
    return best;
}

// The same of weights that are dequantised for it: reads a byte of each, and writes two.
inline double dequantised_clocks(int32_t tokens, int32_t outputs, int32_t depth, const SmRates& rates,
                                 int32_t num_sms) {
    const int32_t block = dequantised_block(outputs, depth);
    if (block == 0) return std::numeric_limits<double>::infinity();
    constexpr double kLaunches = 8000;  // of both kernels, for each block
    const double more_blocks = (outputs - 1) / block, gpu_bytes = rates.dram_bytes * num_sms;
    return cublas_clocks(tokens, outputs, depth, rates, num_sms) + 3.0 * outputs * depth / gpu_bytes + kLaunches / 2 +
           more_blocks * kLaunches;
}

}  // namespace fastattn
