// Tiles of the int8 matmul kernels for sm_90a. instances.json lists the rows for which they exist.
#pragma once

#include <algorithm>
#include <cstdint>

#include "int8_matmul/work.h"

namespace fastattn {

// A team, the two CTAs of a cluster, computes a tile: each CTA 128 of its outputs, and both the same tokens, of which each
// copies a half for both. A CTA has two consumers, a warpgroup each with 64 of the outputs, and a producer.
inline constexpr int kTeamCtas = 2;
inline constexpr int kCtaOutputs = 128;
inline constexpr int kTeamOutputs = kTeamCtas * kCtaOutputs;

constexpr MatmulTile team_tile(int32_t tokens, int32_t depth, bool dequantises) {
    return {tokens,           kTeamOutputs,        depth,     dequantises,
            /*goes_on=*/true, /*uses_wgmma=*/true, kTeamCtas, /*ctas_per_sm=*/1};
}

// kBlockM: tokens of the tile. kStageBytes: of a ring's stage in a CTA. kOtherBytes: what barriers take, and what else is in
// shared memory, at most.
template <int kBlockM_, int kStageBytes_, int kBlockK_, int kOtherBytes = 1 << 10>
struct TeamTileSm90 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockK = kBlockK_;
    static constexpr int kNumConsumers = 2;
    static constexpr int kNumWarps = 4 * (kNumConsumers + 1);
    static constexpr int kNumThreads = 32 * kNumWarps;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    // They exchange what a CTA starts with, 168 for each thread.
    static_assert(kNumConsumers * kConsumerRegisters + kProducerRegisters <= 3 * 168);
    // Sums pass through shared memory to the result, so many tokens at a time.
    static constexpr int kPassTokens = kBlockM % 64 == 0 ? 64 : 32;
    static constexpr int kSumsBytes = kPassTokens * (kCtaOutputs + 4) * 4;
    static constexpr int kStageBytes = kStageBytes_;
    static constexpr int kNumStages = std::min(8, ((227 << 10) - kOtherBytes - kSumsBytes) / kStageBytes);
};

// 64 int8 numbers of each row of weights, and as many elements of each token. Sums are kBlockM / 2 registers of a thread, and
// as many again where groups of K have a scale each, whose sums are multiplied before they are added: 128 tokens at most then.
template <int kBlockM>
struct Int8MatmulTileSm90 : TeamTileSm90<kBlockM, kCtaOutputs * 64 + kBlockM * 128, 64> {
    static constexpr MatmulTile kMatmulTile = team_tile(kBlockM, 64, /*dequantises=*/true);
};

// The same with int8 activations: 128 numbers of each row of both.
//
// Of a step, in clocks of an SM, predicted from machine code: what the tensor cores need, and what a step takes with an L2
// that brings 24 bytes a clock, which binds. With groups it is the SM itself: 1412, 1784 and 1925 clocks with 128 tokens and
// groups of 128, 64 and 32, whose sums are converted and scaled beside the products of the other consumer.
//
//   tokens   bytes from L2   tensor cores   step
//      256           32768           1024   1390
//      192           28672            768   1230
//      128           24576            512   1003
//       64           20480            256    837
//
// So the largest tile reaches 0.74 of the tensor cores' rate. A team of four CTAs, with 512 outputs, would load 24576 bytes
// for 256 tokens.
template <int kBlockM>
struct Int8MatmulS8TileSm90 : TeamTileSm90<kBlockM, (kCtaOutputs + kBlockM) * 128, 128> {
    static constexpr MatmulTile kMatmulTile = team_tile(kBlockM, 128, /*dequantises=*/false);
};

// As of 16-bit activations, with columns of dX for outputs: a step takes 64 of the sum. Beside the ring are its stages' factors. The producer
// warpgroup also makes these, and adds up tokens: it needs more registers.
template <int kBlockM>
struct Int8GradInputTileSm90 : TeamTileSm90<kBlockM, kCtaOutputs * 64 + kBlockM * 128, 64, 14 << 10> {
    static constexpr int kConsumerRegisters = 224;
    static constexpr int kProducerRegisters = 56;
    static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);
    static constexpr MatmulTile kMatmulTile = team_tile(kBlockM, 64, /*dequantises=*/true);
};

}  // namespace fastattn
