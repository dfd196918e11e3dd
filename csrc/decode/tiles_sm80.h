// Tiles of flash-decoding for sm_80, and the list of head dims that it exists for.
#pragma once

#include <cstdint>
#include <utility>

#include "host/dispatch.h"

namespace fastattn {

// Head dims in between run in the next larger one: nothing of what they lack is loaded.
using DecodeHeadDims = std::integer_sequence<int, 64, 128, 256>;

// A warp takes 16 keys at a time, all rows and all dims: nobody waits for another warp in the loop. Its ring of keys
// and values is 16 KB, of which at least half is on its way at any time: with two CTAs, 64 KB an SM. An H200 (4.8 TB/s,
// 132 SMs) needs 29 KB an SM to cover 0.8 us of latency, an A100 (2.0 TB/s, 108 SMs) 15 KB.
//
// 16 keys, of n dims each in K and V, are 64 n bytes of a 16-bit cache and half as many of an int8 cache. While an H200's
// memory brings them (18.4 bytes a clock and SM), an SM issues so many instructions, and so many are executed for them
// by the emulator's count, of a contiguous cache, where all rows see all keys:
//
//   dims              64    128    256
//   16-bit: slots    890   1780   3560
//     executed       370    443    606
//   int8: slots      445    890   1780
//     executed       377    672    930
//
// Of int8 with 64 dims 16 keys are 1 KB, and a step of 16 would execute more than there are slots for: there a warp takes
// 32 at a time.
template <int kHeadDim, bool kInt8>
struct DecodeTileSm80 {
    static constexpr int kBlockM = 16;
    static constexpr int kWarpN = kInt8 && kHeadDim == 64 ? 32 : 16;
    static constexpr int kNumWarps = 4;
    static constexpr int kBlockN = kNumWarps * kWarpN;
    static constexpr int kRingBytes = 16 << 10;
    static constexpr int kMinCtasPerSm = 2;
};

// The keys of a step of the kernel for these dims.
inline int32_t decode_block_n(int32_t widest_dim, bool is_int8) {
    int32_t found = 0;
    dispatch_at_least(DecodeHeadDims{}, widest_dim, [&](auto head_dim) {
        dispatch_bool(is_int8, [&](auto int8) { found = DecodeTileSm80<head_dim.value, int8.value>::kBlockN; });
    });
    return found;
}

}  // namespace fastattn
