// Tiles of the int8 matmul kernels for sm_90a. instances.json lists the values of kBlockM for which they exist.
#pragma once

#include <cstdint>

#include "device/registers.h"
#include "device/shared_memory.h"
#include "host/min_max.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// A cluster of two CTAs computes a tile with 256 columns of N. Each CTA has 128 of these columns and all of the tile's
// rows of M. Each CTA copies half of the rows, into the shared memory of both CTAs. A CTA has three warpgroups: two
// consumers with 64 of its columns each, and a producer.
inline constexpr int kClusterSize = 2;
inline constexpr int kCtaN = 128;
inline constexpr int kClusterN = kClusterSize * kCtaN;

constexpr MatmulTile cluster_tile(int32_t block_m, int32_t block_k, bool multiplies_in_16bit) {
    return {block_m,
            kClusterN,
            block_k,
            multiplies_in_16bit,
            /*is_persistent=*/true,
            /*uses_wgmma=*/true,
            kClusterSize,
            /*ctas_per_sm=*/1,
            /*scales_weights=*/multiplies_in_16bit};
}

// kStageBytes: the bytes of one stage of a CTA's ring. kOtherBytes: an upper bound of the shared memory that a CTA
// needs besides stages and results, for example for barriers.
template <int kBlockM_, int kStageBytes_, int kBlockK_, int kOtherBytes = 1 << 10>
struct ClusterTileSm90 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockK = kBlockK_;
    static constexpr int kNumConsumers = 2;
    static constexpr int kNumWarps = 4 * (kNumConsumers + 1);
    static constexpr int kNumThreads = 32 * kNumWarps;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static_assert(has_registers_for(kNumConsumers + 1, kProducerRegisters + kNumConsumers * kConsumerRegisters));
    // How many rows of M pass through shared memory to the result at a time.
    static constexpr int kPassM = 32;
    static constexpr int kResultBytes = kPassM * kCtaN * 2;
    static constexpr int kStageBytes = kStageBytes_;
    static constexpr int kNumStages =
        std::min(8, (static_cast<int>(kSharedBytesPerCtaSm90) - kOtherBytes - 2 * kResultBytes) / kStageBytes);
};

// A step takes 64 int8 numbers of each row of weights, and 64 elements of each row of the input. The sums take kBlockM
// / 2 registers of a thread.
template <int kBlockM>
struct Int8MatmulTileSm90 : ClusterTileSm90<kBlockM, kCtaN * 64 + kBlockM * 128, 64> {
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 64, /*multiplies_in_16bit=*/true);
};

// The tile with int8 activations: a step takes 128 int8 numbers of each row of the weights and of the input. In a step
// a CTA loads 20480, 24576, 28672 or 32768 bytes from L2 if kBlockM is 64, 128, 192 or 256. Only with 64 does loading
// these bytes take longer than multiplying them. With groups, converting and scaling the groups' sums takes longest.
template <int kBlockM>
struct Int8MatmulS8TileSm90 : ClusterTileSm90<kBlockM, (kCtaN + kBlockM) * 128, 128> {
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;  // the first tile's weights and tokens are loaded apart
    static_assert(has_registers_for(/*num_warpgroups=*/3, kProducerRegisters + 2 * kConsumerRegisters));
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 128, /*multiplies_in_16bit=*/false);
};

// The input gradient's tile: kBlockM rows and kClusterN columns of dX. The sum runs over N; a step takes 64 of it.
// Shared memory also holds the 16-bit factors of each stage (scale_factors_sm90.cuh). The producer warpgroup makes the
// factors and adds up tokens for the gradient of a bias, so it needs more registers.
template <int kBlockM>
struct Int8GradInputTileSm90 : ClusterTileSm90<kBlockM, kCtaN * 64 + kBlockM * 128, 64, 14 << 10> {
    static constexpr int kConsumerRegisters = 224;
    static constexpr int kProducerRegisters = 56;
    static_assert(has_registers_for(/*num_warpgroups=*/3, kProducerRegisters + 2 * kConsumerRegisters));
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 64, /*multiplies_in_16bit=*/true);
};

}  // namespace fastattn
