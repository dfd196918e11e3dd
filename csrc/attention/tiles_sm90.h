// Tiles of the attention kernels for sm_90a.
#pragma once

namespace fastattn {

template <int kHeadDim, int kValueDim>
struct ForwardTileSm90;

template <>
struct ForwardTileSm90<64, 64> {
    static constexpr int kNumConsumers = 3;
    static constexpr int kBlockN = 96;
    static constexpr int kStages = 3;
    static constexpr int kConsumerRegisters = 160;
    static constexpr int kProducerRegisters = 32;
    static constexpr bool kSharesKeys = false;
};

template <>
struct ForwardTileSm90<96, 96> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr bool kSharesKeys = false;
};

template <>
struct ForwardTileSm90<128, 128> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 128;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr bool kSharesKeys = true;
};

template <>
struct ForwardTileSm90<192, 192> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 96;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr bool kSharesKeys = true;
};

template <>
struct ForwardTileSm90<192, 128> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 112;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 232;
    static constexpr int kProducerRegisters = 40;
    static constexpr bool kSharesKeys = true;
};

template <>
struct ForwardTileSm90<256, 256> {
    static constexpr int kNumConsumers = 2;
    static constexpr int kBlockN = 80;
    static constexpr int kStages = 2;
    static constexpr int kConsumerRegisters = 240;
    static constexpr int kProducerRegisters = 24;
    static constexpr bool kSharesKeys = true;
};

}  // namespace fastattn
