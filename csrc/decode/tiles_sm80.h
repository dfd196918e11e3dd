// Tiles of flash-decoding for sm_80.
#pragma once

#include "host/min_max.h"

namespace fastattn {

// A warp takes 16 keys at a time, 16 rows and all dims: nobody waits for another warp in the loop. Its ring of keys and
// values is 16 KB, of which at least half is in flight at any time: with two CTAs, 64 KB an SM, which covers the
// latency of device memory at its full rate.
//
// tests/decode/test_cuda_decode.py says how many instructions are executed for 16 keys. Memory brings 16 keys of an
// 8-bit cache in half of the time. So with 8 bits a warp takes 32 keys at a time up to 128 dims, over which the
// instructions of a step are spread, and with 64 dims there are three CTAs, whose rings are 8 KB, 48 KB of them in
// flight.
//
// kBlockM: 16 rows, or 32 where more than 16 share a KV head. Then two warps take the same keys (row_warps.cuh), each
// for 16 rows and in as many registers as before, so that an SM holds one such CTA instead of two. They execute 1.6
// times the instructions of one warp; two tiles of 16 rows would execute twice as many, and load twice. With 64 rows,
// by four warps a ring, nothing would be gained: each warp executes as much for a key, and an SM holds no more warps.
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
