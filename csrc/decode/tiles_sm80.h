// Tiles of flash-decoding for sm_80.
#pragma once

#include "host/min_max.h"

namespace fastattn {

// A warp takes 16 keys at a time with 16 rows and all dims, so no warp waits for another in the loop. Its ring of keys
// and values is 16 KB, at least half of which is in flight at any time. With two CTAs, that is 64 KB per SM, which
// covers the latency of device memory at its full rate.
//
// tests/decode/test_cuda_decode.py counts the instructions that 16 keys take. Memory delivers 16 keys of an 8-bit cache
// in half the time of a 16-bit cache. So, with 8 bits and up to 128 dims, a warp takes 32 keys at a time, which spreads
// the instructions of a step over more keys. With 8 bits and 64 dims, an SM holds three CTAs with rings of 8 KB, and at
// least 48 KB per SM are in flight.
//
// kBlockM is 16 rows, or 32 if more than 16 rows read a KV head. With 32 rows, two warps take the same keys
// (row_warps.cuh), each for 16 rows and with as many registers as a warp of the small tile, so an SM holds one such CTA
// instead of two. The two warps together execute 1.6 times the instructions of one warp. Two tiles of 16 rows would
// execute and load twice as much as one. 64 rows with four warps per ring would gain nothing: a warp would execute as
// many instructions per key, and an SM would hold no more warps.
template <int kBlockM_, int kHeadDim, bool k8BitCache>
struct DecodeTileSm80 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kRowWarps = kBlockM / 16, kKeyGroups = 4;
    static constexpr int kWarpN = k8BitCache && kHeadDim <= 128 ? 32 : 16;
    static constexpr int kNumWarps = kRowWarps * kKeyGroups;
    static constexpr int kBlockN = kKeyGroups * kWarpN;
    static constexpr bool kIsSmall = k8BitCache && kHeadDim == 64 && kRowWarps == 1;
    static constexpr int kRingBytes = kIsSmall ? 8 << 10 : std::max(16 << 10, kBlockM * kHeadDim * 4);
    static constexpr int kMinCtasPerSm = kIsSmall ? 3 : 2 / kRowWarps;
};

}  // namespace fastattn
