// Tiles of flash-decoding for sm_80.
#pragma once

namespace fastattn {

// A warp takes 16 keys at a time, all rows and all dims: nobody waits for another warp in the loop. Its ring of keys
// and values is 16 KB, of which at least half is on its way at any time: with two CTAs, 64 KB an SM. An H200 (4.8 TB/s,
// 132 SMs) needs 29 KB an SM to cover 0.8 us of latency, an A100 (2.0 TB/s, 108 SMs) 15 KB.
//
// 16 keys, of n dims each in K and V, are 64 n bytes of a 16-bit cache and half as many of an 8-bit one. While an
// H200's memory brings them (18.4 bytes a clock and SM), an SM has the issue slots of the table. Below them stand the
// instructions that are executed for these keys, by the emulator's count (contiguous cache, all rows see all keys):
//
//   dims              64    128    256
//   16-bit: slots    890   1780   3560
//     executed       329    400    547
//   8-bit: slots     445    890   1780
//     executed       356    620    879    int8
//     executed       471    854   1338    fp8 as float16
//     executed       500    916   1464    fp8 as bfloat16
//
// So where 16 keys of fp8 are 64 dims wide, or 128 with bfloat16, the issue slots of an H200 are predicted to bind.
// With 8 bits and 64 dims, 16 keys are 1 KB, and a step of 16 would execute more instructions than there are issue slots:
// so a warp takes 32 keys at a time there.
template <int kHeadDim, bool k8BitCache>
struct DecodeTileSm80 {
    static constexpr int kBlockM = 16;
    static constexpr int kWarpN = k8BitCache && kHeadDim == 64 ? 32 : 16;
    static constexpr int kNumWarps = 4;
    static constexpr int kBlockN = kNumWarps * kWarpN;
    static constexpr int kRingBytes = 16 << 10;
    static constexpr int kMinCtasPerSm = 2;
};

}  // namespace fastattn
