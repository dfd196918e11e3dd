// Predicts how long a matmul with int8 weights takes if blocks of the weights are dequantised to 16 bits, and cuBLAS
// multiplies by them. api/kernel_choice.h compares this with the time of our own kernels. The numbers come from
// formulas, not from measurements. Times are in clocks of an SM.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "host/host_device.h"
#include "host/sm_rates.h"

namespace fastattn {

// The most weights that are dequantised at a time, to 16 bits each.
inline constexpr int64_t kDequantisedElements = int64_t{32} << 20;  // 64 MB
inline constexpr int32_t kDequantisedRowMultiple = 16;              // elements: dequantised rows are padded to it
inline constexpr int32_t kBlockMultiple = 256;                      // rows or columns of a block are a multiple of this

// Returns the elements from one dequantised row to the next.
inline int64_t dequantised_stride(int32_t columns) {
    return ceil_div(int64_t{columns}, kDequantisedRowMultiple) * kDequantisedRowMultiple;
}

// Returns how many of `count` rows (or columns) of the weights, of `elements` elements each, are dequantised at a time.
// Returns 0 if fewer than kBlockMultiple fit. Both sizes count with their padding.
inline int32_t dequantised_block(int32_t count, int32_t elements) {
    const int64_t fitting = kDequantisedElements / std::max<int64_t>(dequantised_stride(elements), 1);
    if (fitting >= dequantised_stride(count)) return count;
    return static_cast<int32_t>(fitting / kBlockMultiple * kBlockMultiple);
}

inline constexpr double kLaunchClocks = 4000;  // a launch, with its first and last loads: an assumption

// Returns the clocks of a 16-bit matmul of sizes M, N and K by cuBLAS. Assumes that cuBLAS chooses the best of a few
// tiles and of a few numbers of splits along K, and that a second kernel adds up the partials of the splits.
inline double cublas_clocks(int32_t M, int32_t N, int32_t K, const SmRates& rates, int32_t num_sms) {
    struct Tile {
        int32_t block_m, block_n;
        double reached;  // its rate as a fraction of the largest tile's: an assumption
    };
    constexpr Tile kTiles[] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.9}, {64, 256, 0.9}, {64, 128, 0.75}};
    const double gpu_bytes = rates.dram_bytes * num_sms, results = static_cast<double>(M) * N;
    const double operands = static_cast<double>(K) * (static_cast<double>(M) + N);
    double best = std::numeric_limits<double>::infinity();
    for (const Tile& tile : kTiles) {
        const double tiles = std::ceil(double{1} * M / tile.block_m) * std::ceil(double{1} * N / tile.block_n);
        for (int32_t splits = 1; splits <= 8; splits *= 2) {
            const double waves = std::ceil(tiles * splits / num_sms);
            const double products = waves * tile.block_m * tile.block_n * (double{1} * K / splits) /
                                    (tile.reached * rates.cublas_macs_16bit);
            const double combining = splits == 1 ? 0 : kLaunchClocks + 8.0 * splits * results / gpu_bytes;
            best =
                std::min(best, kLaunchClocks + combining + std::max(products, 2.0 * (operands + results) / gpu_bytes));
        }
    }
    return best;
}

// Returns the clocks of the same matmul, including those for dequantising its int8 weights block by block. Dequantising
// reads one byte of each weight and writes two. Returns infinity if no block fits in kDequantisedElements.
inline double dequantised_clocks(int32_t M, int32_t N, int32_t K, const SmRates& rates, int32_t num_sms) {
    const int32_t block = dequantised_block(N, K);
    if (block == 0) return std::numeric_limits<double>::infinity();
    const auto block_clocks = [&](int32_t columns) {
        const double written = kLaunchClocks + 3.0 * columns * K / (rates.dram_bytes * num_sms);
        return written + cublas_clocks(M, columns, K, rates, num_sms);
    };
    const int32_t last = N % block;
    return N / block * block_clocks(block) + (last > 0 ? block_clocks(last) : 0);
}

// Returns the clocks of a separate kernel that sums a 16-bit matrix [M, columns] over M. cuBLAS needs it for the
// gradient of a bias, which our own kernels compute while they multiply.
inline double token_sum_clocks(int32_t M, int32_t columns, const SmRates& rates, int32_t num_sms) {
    return kLaunchClocks + 2.0 * M * columns / (rates.dram_bytes * num_sms);
}

}  // namespace fastattn
