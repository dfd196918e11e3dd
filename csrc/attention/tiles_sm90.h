// Tiles of the attention kernels for sm_90a. Adding a head dim: a row here, and its numbers in instances.json.
#pragma once

namespace fastattn {

// Registers of a consumer: O is kValueDim / 2 of them, S kBlockN / 2, and P, which is two tiles of keys at a time, kBlockN / 2
// more. Warpgroups exchange what the CTA starts with: 168 for each of 384 threads, 128 for each of 512.
template <int kHeadDim, int kValueDim>
struct ForwardTileSm90;

// Counts are of the SASS for sm_90a (nvcc 13.0), per warp and two steps of 64 rows by kBlockN keys, along the path that is
// taken as long as rows have a reference that is not outgrown; all but one column are of unmasked steps. The machine code is
// held to them by tests/machine_code/test_hopper_kernels.py. Clocks are those of 64 rows by 64 keys on an SM: what the tensor
// cores and the exponentials (16 lanes a clock) take at least, and what a simulation of the machine code predicts, with tiles
// of keys shared by two CTAs where a tile below has a number for that. Nothing here is measured. What binds in the prediction
// are the ports of the register file, for every head dim; FlashAttention-3 is at 476, 727 and 1338 clocks for 64, 128 and 256
// dims in the same simulation.
//
// Forward: head dim  instructions  :masked  HGMMA  MUFU.EX2  registers  shared-KB  clocks:HGMMA  :EX2  :predicted
//                64           542      790     20        96        128         96           256   256         414
//                96           698     1042     28       128        168        120           384   256         541
//               128           721     1086     32       128        168        160           512   256         662
//          192, 128           565      864     34        80        128        172           640   256         803
//               192           633      953     36        96        168        192           768   256         923
//               256           617      928     42        80        168        224          1024   256        1193

// Three consumers share what is copied, and cover each other's waits: here a softmax takes as long as the products. Two
// of them with 128 keys are predicted to be as fast, but take half as much again from the L2 cache.
template <>
struct ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 96;  // 112: products are serialised, as P and S do not fit in 160 registers
    static constexpr int kStages = 3;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToShareUnderMask = 0;
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
    static constexpr int kTilesToShareUnderMask = 0;
    static constexpr bool kMasksInPlace = false;
};

// Alone, a CTA would need 5.7 TB/s of keys and values on an H100, all that its L2 cache gives: predicted 700 clocks. That is
// so from here on: 1059 clocks at 192 dims, 1412 at 256.
template <>
struct ForwardTileSm90<128, 128> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kTilesToShareUnderMask = 96;
    static constexpr bool kMasksInPlace = false;
};

// What DeepSeek's latent attention (MLA) computes for prompts. Three consumers take so much less from the L2 cache than
// two, 4.1 TB/s, that nothing has to be shared. Two with 128 keys are predicted at 792 clocks where they share these, and
// at 884 where they do not.
template <>
struct ForwardTileSm90<192, 128> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 80;  // 96: products are serialised, as P and S do not fit in 160 registers
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kTilesToShareUnderMask = 0;
    static constexpr bool kMasksInPlace = true;  // two tiles of P beside masks spill
};

template <>
struct ForwardTileSm90<192, 192> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kTilesToShareUnderMask = 32;
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
    static constexpr int kTilesToShareUnderMask = 24;
    static constexpr bool kMasksInPlace = false;
};

// The kernel with every option. P is one tile of keys at a time there, and a bias kBlockN / 2 registers more. With these tiles
// nothing is in local memory up to 128 dims; above, a few numbers are, most of them where NaN is taken out of values. Fewer keys
// a step would cure that and starve the tensor cores. Predicted clocks of 64 rows by 64 keys, of scores that are only scaled: 634
// with 64 dims, 1012 with 128, 1166 with 192 and values of 128, 1836 with 256.
template <int kHeadDim, int kValueDim>
struct ForwardOptionsTileSm90 : ForwardTileSm90<kHeadDim, kValueDim> {
    static constexpr int kBlockN = kHeadDim <= 96 ? 96 : 64;  // with 128 dims, 80 keys and more spill in the loop
};

// As many registers as with 128 dims: O and S are those of its tile.
template <>
struct ForwardOptionsTileSm90<192, 128> : ForwardOptionsTileSm90<128, 128> {};

// Three consumers with 64 keys are predicted at 600 clocks, but spill in the loop.
template <>
struct ForwardOptionsTileSm90<64, 64> : ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
};

// The backward kernel, whether it has options or not: kBlockM query rows a step; a consumer owns kKeyBlocks times 64
// keys, each block with 64 registers of dK and dV for every 64 dims. Predicted clocks of 64 rows by 64 keys without
// options, full and masked: 1080 and 1390 with 64 dims, 1829 and 2009 with 128, 1571 (full) with 96; FlashAttention-3
// is at 1043 and 1808 (full) in the same simulation, which counts what TMA brings and what is read to be added to
// dQ's sums as traffic of shared memory. What binds are shared memory and the ports of the register file. Nothing is
// measured.
//
// Tried: 128 rows by 128 keys with 64 dims (1244 clocks: products are serialised, as registers are short); dP before dV, so that
// dV runs beside dS (serialised); P beside dQ, which with 128 dims is predicted to save 2 %, and with 64 is serialised.
template <int kHeadDim>
struct BackwardTileSm90 {
    static constexpr int kBlockM = 64;
    static constexpr int kKeyBlocks = kHeadDim <= 64 ? 2 : 1;
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 64 * kKeyBlocks * kNumConsumers;
    static constexpr int kStages = 2;  // three do not fit in 227 KB
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
};

// The same with more than 128 dims: 64 query rows by 64 keys a step. The chains of values and of keys have kScoreRegisters: 128
// for a gradient of 256 dims, 48 for scores. That of queries has 32 for 64 dims of dQ.
//
// Counts of a full step (nvcc 13.0, bf16), of the three chains, and predicted clocks of it; nothing is measured.
//   head dim  instructions  HGMMA  shared-KB  clocks:HGMMA  :predicted  :predicted for sm_80
//   192, 128           700     40        186          1664        3346                  8651
//        192           722     44        210          1920        3646                  8651
//        256           756     64        226          2560        5014                 11476
// What binds is the L2 cache: with 64 keys a tile, a step brings Q and dO and adds dQ, which is 512 bytes for each dim. Without
// that, shared memory would, at 2482, 2748 and 3447 clocks. More keys do not fit into the registers of an SM.
inline constexpr int kMostNarrowDims = 128;
template <int kHeadDim, int kValueDim>
struct BackwardWideTileSm90 {
    static constexpr int kStages = 2;
    static constexpr int kPassStages = kHeadDim <= 192 ? 2 : 1;  // of P and dS; more do not fit in 227 KB
    static constexpr int kPartStages = kHeadDim <= 192 ? 2 : 1;
    static constexpr int kScoreRegisters = 208;
    static constexpr int kQueryRegisters = 64;
    static constexpr int kProducerRegisters = 32;
};

}  // namespace fastattn
