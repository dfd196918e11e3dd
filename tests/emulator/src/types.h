// PTX's fundamental types and state spaces.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace emulator {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

enum class Type : uint8_t {
    kPred,
    kB8,
    kB16,
    kB32,
    kB64,
    kU8,
    kU16,
    kU32,
    kU64,
    kS8,
    kS16,
    kS32,
    kS64,
    kF16,
    kBF16,
    kF32,
    kF64,
    kTF32,
    kF16x2,
    kBF16x2,
    kU16x2,
    kS16x2,
    kB128,
    kE4M3,
    kE5M2,
    kE4M3x2,
    kE5M2x2,
};

// kShared is .shared::cta, the CTA's own; kCluster is .shared::cluster, any CTA's of the cluster.
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kConst, kParam, kCluster };

constexpr int width_of(Type type) {  // bytes per lane; 0 for a predicate, whose register holds one bit per lane
    switch (type) {
        case Type::kPred:
            return 0;
        case Type::kB8:
        case Type::kU8:
        case Type::kS8:
        case Type::kE4M3:
        case Type::kE5M2:
            return 1;
        case Type::kB16:
        case Type::kU16:
        case Type::kS16:
        case Type::kF16:
        case Type::kBF16:
        case Type::kE4M3x2:
        case Type::kE5M2x2:
            return 2;
        case Type::kB64:
        case Type::kU64:
        case Type::kS64:
        case Type::kF64:
            return 8;
        case Type::kB128:
            return 16;
        default:
            return 4;
    }
}

constexpr bool is_signed(Type type) {
    return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

constexpr bool is_unsigned(Type type) {
    return type == Type::kU8 || type == Type::kU16 || type == Type::kU32 || type == Type::kU64;
}

constexpr bool is_integer(Type type) {
    return is_signed(type) || is_unsigned(type);
}

constexpr bool is_bits(Type type) {
    return type == Type::kB8 || type == Type::kB16 || type == Type::kB32 || type == Type::kB64 || type == Type::kB128;
}

constexpr bool is_float(Type type) {
    return type >= Type::kF16 && type <= Type::kBF16x2;
}

constexpr bool is_packed(Type type) {
    return type == Type::kF16x2 || type == Type::kBF16x2;
}

constexpr bool is_integer_pair(Type type) {
    return type == Type::kU16x2 || type == Type::kS16x2;
}

constexpr Type bits_of_width(int bytes) {
    return bytes == 1   ? Type::kB8
           : bytes == 2 ? Type::kB16
           : bytes == 4 ? Type::kB32
           : bytes == 8 ? Type::kB64
                        : Type::kB128;
}

std::optional<Type> parse_type(std::string_view name);    // "f32"
std::optional<Space> parse_space(std::string_view name);  // "shared"

// Runs a function for each lane of a mask. For a full mask the loop is one that compilers vectorise.
template <typename Function>
inline __attribute__((always_inline)) void each_lane(uint32_t mask, Function&& function) {
    if (mask == kAllLanes) {
        for (int lane = 0; lane < kWarpSize; ++lane) function(lane);
    } else {
        for (; mask != 0; mask &= mask - 1) function(__builtin_ctz(mask));
    }
}

}  // namespace emulator
