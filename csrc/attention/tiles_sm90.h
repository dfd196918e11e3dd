// Tiles of the attention kernels for sm_90a. Adding a head dim: a row here, and its numbers in instances.json.
#pragma once

namespace fastattn {

// Registers of a consumer: O is kValueDim / 2 of them, S kBlockN / 2, and P, which is two tiles of keys at a time,
// kBlockN / 2 more. Warpgroups exchange what the CTA starts with: 168 for each of 384 threads, 128 for each of 512.
// tests/machine_code/test_hopper_kernels.py says how many instructions a step may have.
template <int kHeadDim, int kValueDim>
struct ForwardTileSm90;

// Three consumers use one copy, and cover each other's waits: here a softmax takes as long as the products. Two of them
// with 128 keys would load half as much again from the L2 cache.
template <>
struct ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 96;  // 112: products are serialised, as P and S do not fit in 160 registers
    static constexpr int kStages = 3;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToPairUnderMask = 0;
    static constexpr bool kMasksInPlace = false;
};

// Blocks of 32 columns (device/tma_tile.cuh): 96 is no whole number of 64, which would pad its rows with zeros.
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

// From here on CTAs come in pairs, and each copies half of a tile for both: half as many bytes leave the L2 cache.
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

// The dims of DeepSeek's latent attention (MLA) for prompts. Three consumers load so much less from the L2 cache than
// two that CTAs need no pairs.
template <>
struct ForwardTileSm90<192, 128> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 80;  // 96: products are serialised, as P and S do not fit in 160 registers
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToPairUnderMask = 0;
    static constexpr bool kMasksInPlace = true;  // two tiles of P beside masks spill
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

// O alone is 128 registers. Two stages of 80 keys fill the shared memory.
template <>
struct ForwardTileSm90<256, 256> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 80;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 240;  // 232: products are serialised
    static constexpr int kProducerRegisters = 24;
    static constexpr int kTilesToPairUnderMask = 24;
    static constexpr bool kMasksInPlace = false;
};

// The kernel with every option. P is one tile of keys at a time there, and a bias kBlockN / 2 registers more. With
// these tiles next to nothing is in local memory.
template <int kHeadDim, int kValueDim>
struct ForwardOptionsTileSm90 : ForwardTileSm90<kHeadDim, kValueDim> {
    static constexpr int kBlockN = kHeadDim <= 96 ? 96 : 64;  // with 128 dims, 80 keys and more spill in the loop
};

// As many registers as with 128 dims: O and S are those of its tile.
template <>
struct ForwardOptionsTileSm90<192, 128> : ForwardOptionsTileSm90<128, 128> {};

// Three consumers with 64 keys spill in the loop.
template <>
struct ForwardOptionsTileSm90<64, 64> : ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// The backward kernel, whether it has options or not: kBlockM query rows a step; a consumer owns kKeyBlocks times 64
// keys, each block with 64 registers of dK and dV for every 64 dims. Shared memory binds.
//
// ptxas serialises the products of 128 rows by 128 keys with 64 dims, as registers are short; of dP before dV, so that
// dV runs beside dS; and, with 64 dims, of P beside dQ.
template <int kHeadDim>
struct BackwardTileSm90 {
    static constexpr int kBlockM = 64;
    static constexpr int kKeyBlocks = kHeadDim <= 64 ? 2 : 1;
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 64 * kKeyBlocks * kNumConsumers;
    static constexpr int kStages = 2;  // three do not fit in 227 KB
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr bool kHasRegisters = true;  // for options: see TransposedOptions
};

// The same with more than 128 dims: 64 query rows by 64 keys a step. The chains of values and of keys have
// kScoreRegisters: 128 for a gradient of 256 dims, 48 for scores. That of queries has 32 for 64 dims of dQ.
// Shared memory binds (in a simulation of the machine code).
inline constexpr int kMostNarrowDims = 128;
template <int kHeadDim, int kValueDim>
struct BackwardWideTileSm90 {
    static constexpr int kStages = 2;
    static constexpr int kPassStages = kHeadDim <= 192 ? 2 : 1;  // of P and dS; more do not fit in 227 KB
    static constexpr int kPanelStages = kHeadDim <= 192 ? 2 : 1;
    static constexpr bool kHasRegisters = kHeadDim <= 192;  // for options
    static constexpr int kScoreRegisters = 208;
    static constexpr int kQueryRegisters = 64;
    static constexpr int kProducerRegisters = 32;
};

}  // namespace fastattn
