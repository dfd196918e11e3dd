// Tiles of the int8 matmul kernels for sm_90a. instances.json lists the rows for which they exist.
#pragma once

#include <cstdint>

#include "device/registers.h"
#include "device/shared_memory.h"
#include "host/min_max.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// A cluster of two CTAs computes a tile. Each CTA has 128 of its columns of N. Both have the same rows of M, of which
// each copies half for both. A CTA has two consumers, warpgroups with 64 of the columns each, and a producer.
inline constexpr int kClusterSize = 2;
inline constexpr int kCtaN = 128;
inline constexpr int kClusterN = kClusterSize * kCtaN;

constexpr MatmulTile cluster_tile(int32_t block_m, int32_t block_k, bool dequantises) {
    return {block_m,          kClusterN,           block_k,      dequantises,
            /*goes_on=*/true, /*uses_wgmma=*/true, kClusterSize, /*ctas_per_sm=*/1};
}

// kStageBytes: the bytes of a ring's stage in a CTA. kOtherBytes: an upper bound of the shared memory of all but stages
// and sums, barriers included.
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
    // The rows of M that pass through shared memory to the result at a time.
    static constexpr int kPassM = kBlockM % 64 == 0 ? 64 : 32;
    static constexpr int kSumsBytes = kPassM * (kCtaN + 4) * 4;
    static constexpr int kStageBytes = kStageBytes_;
    static constexpr int kNumStages =
        std::min(8, (static_cast<int>(kMostSharedBytesPerCta) - kOtherBytes - kSumsBytes) / kStageBytes);
};

// A step takes 64 int8 numbers of each row of weights, and 64 elements of each row of the input. Sums take kBlockM / 2
// registers of a thread. With a scale for each group of K they take as many again, because a group's sums are scaled
// before they are added: kBlockM is 128 at most then.
template <int kBlockM>
struct Int8MatmulTileSm90 : ClusterTileSm90<kBlockM, kCtaN * 64 + kBlockM * 128, 64> {
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 64, /*dequantises=*/true);
};

// The tile with int8 activations: a step takes 128 numbers of each row of both. It loads 20480, 24576, 28672 and 32768
// bytes from L2 for 64, 128, 192 and 256 rows of M. Only with 64 rows, L2 delivers less than the products would take.
// With groups, converting and scaling their sums binds.
template <int kBlockM>
struct Int8MatmulS8TileSm90 : ClusterTileSm90<kBlockM, (kCtaN + kBlockM) * 128, 128> {
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 128, /*dequantises=*/false);
};

// The input gradient's tile: N of the product is the columns of dX, and a step takes 64 of the sum. Shared memory also
// holds the stages' factors. The producer warpgroup makes these and adds up tokens, and so needs more registers.
template <int kBlockM>
struct Int8GradInputTileSm90 : ClusterTileSm90<kBlockM, kCtaN * 64 + kBlockM * 128, 64, 14 << 10> {
    static constexpr int kConsumerRegisters = 224;
    static constexpr int kProducerRegisters = 56;
    static_assert(has_registers_for(/*num_warpgroups=*/3, kProducerRegisters + 2 * kConsumerRegisters));
    static constexpr MatmulTile kMatmulTile = cluster_tile(kBlockM, 64, /*dequantises=*/true);
};

}  // namespace fastattn
