// Tiles of the attention kernels for sm_80. Adding a head dim: a row here, and its number in instances.json.
#pragma once

namespace fastattn {

// A warp owns 32 query rows where O fits in registers, so that each ldmatrix of K or V feeds two rows of MMA tiles:
// with 16 rows, the tensor cores would need 128 bytes of shared memory in a clock, all that sm_80 has. Q
// stays in registers where these last.
template <int kHeadDim>
struct ForwardTileSm80;

// Counts are of the SASS for sm_80 (nvcc 13.0), per warp and unmasked step of its rows by kBlockN keys; the machine
// code is held to them by tests/machine_code/test_native_library.py. Nothing is in local memory in a loop. In the
// forward kernel they include two branches: one rescales O, which few steps do, one is the largest score's. Without the
// first a step of 64 dims has 543 instructions, one of 128 dims 736; the other has about 35.
//
// Forward: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                32           537    64        68    16        168         17
//                64           660   128        68    32        240         33
//                96           796   192        68    60        255         49
//               128           922   256        68    80        255         65
//               192           653   192        34    96        255         97
//               256           509   128        18    64        255         97

// Three CTAs on an SM, because EX2 and the instructions take as long as the products, and only other warps' hide
// them; a fourth (128 registers) spills in the loop. kBlockN = 128 takes 10% fewer instructions per key, with two
// CTAs.
template <>
struct ForwardTileSm80<32> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 3;
    static constexpr bool kQueryInRegisters = true;
};

// kBlockN = 96 and 112 take 7 and 8% fewer instructions per key, but mask up to 95 and 111 columns at the end of every
// sequence and more at the diagonal; three CTAs on an SM (168 registers) spill in the loop.
template <>
struct ForwardTileSm80<64> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = true;
};

// Two CTAs fit in 99 KB as well. Q in registers spills in the loop.
template <>
struct ForwardTileSm80<96> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = false;
};

// O is 128 registers, S 64. Two CTAs fit in an SM's registers, and on sm_80 and sm_90 in its shared memory.
template <>
struct ForwardTileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = false;
};

// Warps of 16 rows: O is 96 registers, Q 48, S 32. With 32 rows O alone is 192, and 32 keys a step spill in the loop.
template <>
struct ForwardTileSm80<192> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// O is 128 registers, Q 64, S 16. Reading Q from shared memory for every 32 keys would take a quarter more of it; 64
// keys do not fit in 99 KB.
template <>
struct ForwardTileSm80<256> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// The kernel with every option. Warps of 16 rows, one CTA on an SM: options take registers, and 64 keys a step, 32
// above 128 dims, take fewer instructions for a key than 32 rows with half of that, whose step with a bias spills in
// the loop. Up to 255 registers, nothing spills.
//
// Keys in pages: instances of their own, for a branch would cost the others instructions and, from 192 dims on,
// registers that are not there.
template <int kHeadDim>
struct ForwardOptionsTileSm80 {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
};

// The backward kernel on small tiles: with options, from 192 dims on, and where the large tiles below do not fit. Its
// products have three shapes, and the warps divide each in their own way: S and dP by kRowWarpsOfS times the rest along
// the keys, dK and dV by kKeyWarps times the rest along the head dim, dQ by kRowWarpsOfQ times the rest: 32x32 of S a
// warp, and at 128 dims 32x64 of dK, dV and dQ. dP comes for 16 keys at a time and dQ for 32 columns of a warp, or dK
// and dV (128 registers) spill; that loads dO and dS twice. Two CTAs of 4 warps on an SM cover each other's waits. With
// options a warp has half of the keys up to 128 dims: registers would not suffice.
//
// Counts as above, of the kernel without options: the loop holds the exponentials of full tiles and those of masked
// ones, of which a step takes one.
//
// Backward: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                 96          1562   240        64   136        244         65
//                128          1806   320        64   160        255         81
//                192           941   120        16    86        239         53
//                256          1100   160        16   104        255         69

template <int kHeadDim, bool kOptions>
struct BackwardTileSm80 {
    static constexpr int kBlockM = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = kOptions && kHeadDim <= 128 ? 8 : 4;
    static constexpr int kRowWarpsOfS = 2;
    static constexpr int kKeyWarps = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kRowWarpsOfQ = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kMinCtasPerSm = kNumWarps == 8 ? 1 : 2;
};

// The backward kernel without options on large tiles of keys, up to 128 dims: half of the additions to dQ's sums for
// each key, and P stays in registers. A warp has 32 keys, of all dims of dV (value warps) or of dK (key warps); both,
// or 64 rows of S at a time, would not fit in its registers at 128 dims. From 96 dims on the tiles take more than the
// 99 KB of some GPUs.
//
// Counts are per 64 rows by 64 keys: a step's, of a value warp and a key warp together, halved. Instructions are those
// that a full step executes in the middle of a head; loops: all that stands in both loops, masks and ends of heads
// included.
//
// Large backward: head dim  instructions  loops  HMMA  MUFU.EX2  LDSM  RED  registers  shared-KB
//                      32           396    702    80        32    40    8        128         66
//                      64           532    942   160        32    68   16        192         98
//                      96           638   1120   240        32    96   24        241        130
//                     128           782   1342   320        32   124   32        255        162
//
// On small tiles these are 620, 742, 900 and 1067 instructions, and 16, 32, 48 and 64 REDs; FlashAttention-2's kernels
// take 563 and 891 instructions at 64 and 128 dims. Two value warps for each 32 keys (12 warps in all), and Pᵀ·dO after
// dSᵀ is in shared memory, gained nothing in a simulation.
template <int kHeadDim>
struct BackwardLargeTileSm80 {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = kHeadDim == 32 ? 2 : 1;
    static constexpr bool kFitsEverywhere = kHeadDim <= 64;  // in 99 KB
};

}  // namespace fastattn
