// Tiles of flash-decoding for sm_80, and the list of head dims that it exists for.
#pragma once

#include <utility>

namespace fastattn {

// Head dims in between run in the next larger one: nothing of what they lack is loaded.
using DecodeHeadDims = std::integer_sequence<int, 64, 128, 256>;

// A warp takes 16 keys at a time, all rows and all dims: nobody waits for another warp in the loop. Its ring of keys
// and values is 16 KB, of which at least half is on its way at any time: with two CTAs, 64 KB an SM. An H200 (4.8 TB/s,
// 132 SMs) needs 29 KB an SM to cover 0.8 us of latency, an A100 (2.0 TB/s, 108 SMs) 15 KB.
//
// A step of 16 keys by 128 + 128 dims is 8 KB of a 16-bit cache, which the bandwidth of either brings in 440 to 620
// clocks of an SM: 1780 issue slots at the least. The emulator counts 706 PTX instructions in it, 100 of them moves. Of
// an int8 cache it is 4 KB, 890 slots and 864 instructions: on an H200, issue is close to what binds there.
template <int kHeadDim>
struct DecodeTileSm80 {
    static constexpr int kBlockM = 16;
    static constexpr int kWarpN = 16;
    static constexpr int kNumWarps = 4;
    static constexpr int kBlockN = kNumWarps * kWarpN;
    static constexpr int kRingBytes = 16 << 10;
    static constexpr int kMinCtasPerSm = 2;
};

}  // namespace fastattn
