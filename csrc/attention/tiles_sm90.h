// Tile sizes of the attention kernels for sm_90a. A new head dim needs entries here, and its numbers in instances.json.
#pragma once

namespace fastattn {

// Tiles of the forward kernel. In each thread of a consumer, O takes kValueDim / 2 registers, S kBlockN / 2, and P of
// two key tiles, in 16 bits, another kBlockN / 2. A CTA starts with 168 registers for each of 384 threads, or 128 for
// each of 512. Its warpgroups then change to kProducerRegisters and kConsumerRegisters (setmaxnreg).
// tests/machine_code/test_hopper_kernels.py bounds the instructions of a step.
template <int kHeadDim, int kValueDim>
struct ForwardTileSm90;

// Three consumers, with 64 rows each, share one copy of K and V. Two consumers would load half as much again from the
// L2 cache. With 64 dims, the softmax of a step takes as long as its products. While one consumer computes the softmax,
// the products of the others fill the tensor cores.
template <>
struct ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 96;  // 112: ptxas serialises the products, as P and S do not fit in 160 registers
    static constexpr int kStages = 3;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToPairUnderMask = 0;
    static constexpr bool kMasksInPlace = false;
};

// TMA tiles have blocks of 32 columns (device/tma_tile.cuh): blocks of 64 would pad rows of 96 dims with zeros.
template <>
struct ForwardTileSm90<96, 96> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kTilesToPairUnderMask = 0;
    static constexpr bool kMasksInPlace = false;
};

// If kTilesToPairUnderMask is not 0, CTAs may form clusters of two (forward_schedule_sm90()). Each CTA then copies half
// of every key tile into both CTAs, so that half as many bytes leave the L2 cache.
template <>
struct ForwardTileSm90<128, 128> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kTilesToPairUnderMask = 96;
    static constexpr bool kMasksInPlace = false;
};

// The dims of DeepSeek's latent attention (MLA) in prefill. Three consumers load so much less from the L2 cache than
// two that CTAs need no clusters.
template <>
struct ForwardTileSm90<192, 128> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 80;  // 96: ptxas serialises the products, as P and S do not fit in 160 registers
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToPairUnderMask = 0;
    static constexpr bool kMasksInPlace = true;  // P of two key tiles and masks together would spill
};

template <>
struct ForwardTileSm90<192, 192> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kTilesToPairUnderMask = 32;
    static constexpr bool kMasksInPlace = false;
};

// O takes 128 registers. Two stages of 80 keys fill the shared memory.
template <>
struct ForwardTileSm90<256, 256> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 80;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 240;  // 232: ptxas serialises the products
    static constexpr int kProducerRegisters = 24;
    static constexpr int kTilesToPairUnderMask = 24;
    static constexpr bool kMasksInPlace = false;
};

// Tiles of the forward kernel with every option. It keeps P of only one key tile, but a bias takes kBlockN / 2 more
// registers. With these tiles almost nothing is in local memory.
template <int kHeadDim, int kValueDim>
struct ForwardOptionsTileSm90 : ForwardTileSm90<kHeadDim, kValueDim> {
    static constexpr int kBlockN = kHeadDim <= 96 ? 96 : 64;  // with 128 dims, 80 keys and more spill in the loop
};

// O and S take as many registers as with 128 dims.
template <>
struct ForwardOptionsTileSm90<192, 128> : ForwardOptionsTileSm90<128, 128> {};

// With three consumers, even 64 keys spill in the loop.
template <>
struct ForwardOptionsTileSm90<64, 64> : ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// Tiles of the backward kernel for up to 128 dims, with and without options. A step has kBlockM query rows. A consumer
// owns kKeyBlocks blocks of 64 keys. dK and dV of a block together take 64 registers of each thread for every 64 dims.
// Shared memory bandwidth is the bottleneck.
//
// Three attempts had too few registers, so that ptxas serialises their products: 128 rows by 128 keys with 64 dims; dP
// started before dV, so that dV overlaps dS; and, with 64 dims, P computed during dQ.
template <int kHeadDim>
struct BackwardTileSm90 {
    static constexpr int kBlockM = 64;
    static constexpr int kKeyBlocks = kHeadDim <= 64 ? 2 : 1;
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 64 * kKeyBlocks * kNumConsumers;
    static constexpr int kStages = 2;  // three stages do not fit in 227 KB
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr bool kHasRegisters = true;  // for options: see TransposedOptions
};

// Tiles of the backward kernel for more than 128 dims: 64 query rows by 64 keys a step. The warpgroups that compute
// scores, those of dV and dK, have kScoreRegisters in each thread: 128 of them hold a gradient of 256 dims, and 48 hold
// scores. The warpgroup that computes dQ has kQueryRegisters: 32 of them hold 64 dims of dQ. In a simulation of the
// machine code, shared memory bandwidth is the bottleneck.
inline constexpr int kMostNarrowDims = 128;
template <int kHeadDim>
struct BackwardWideTileSm90 {
    static constexpr int kStages = 2;
    static constexpr int kPassStages = kHeadDim <= 192 ? 2 : 1;  // of the rings of P and dS; more do not fit in 227 KB
    static constexpr int kPanelStages = kHeadDim <= 192 ? 2 : 1;
    static constexpr bool kHasRegisters = kHeadDim <= 192;  // for options
    static constexpr int kScoreRegisters = 208;
    static constexpr int kQueryRegisters = 64;
    static constexpr int kProducerRegisters = 32;
};

}  // namespace fastattn
