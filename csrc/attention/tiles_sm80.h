// Tile sizes of the attention kernels for sm_80. A new head dim needs entries here, and its number in instances.json.
#pragma once

namespace fastattn {

// A warp owns 32 query rows if O fits in registers: each ldmatrix of K or V then feeds two rows of MMA tiles. With 16
// rows, the tensor cores would need 128 bytes of shared memory per clock, the whole bandwidth of sm_80. Q stays in
// registers if there are enough.
template <int kHeadDim>
struct ForwardTileSm80;

// Counts are of the SASS for sm_80 (nvcc 13.0), per warp and unmasked step of its rows by kBlockN keys.
// tests/machine_code/test_native_library.py checks them. No loop accesses local memory. The counts of the forward
// kernel include two branches: rescaling O, which few steps do, and tracking the largest score (about 35 instructions).
// Without rescaling, a step has 543 instructions with 64 dims and 736 with 128.
//
// Forward: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                32           537    64        68    16        168         17
//                64           660   128        68    32        240         33
//                96           796   192        68    60        255         49
//               128           922   256        68    80        255         65
//               192           653   192        34    96        255         97
//               256           509   128        18    64        255         97

// Three CTAs on an SM: EX2 and the other instructions take as long as the products, and only other warps' products hide
// them. Four CTAs (128 registers) spill in the loop. kBlockN = 128 takes 10% fewer instructions per key, but leaves two
// CTAs on an SM.
template <>
struct ForwardTileSm80<32> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 3;
    static constexpr bool kQueryInRegisters = true;
};

// kBlockN = 96 and 112 take 7 and 8% fewer instructions per key, but mask up to 95 and 111 columns at the end of every
// sequence and more at the diagonal. Three CTAs on an SM (168 registers) spill in the loop.
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

// O takes 128 registers, S 64. Two CTAs fit in an SM's registers and, on sm_80 and sm_90, in its shared memory.
template <>
struct ForwardTileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = false;
};

// Warps of 16 rows: O takes 96 registers, Q 48, S 32. With 32 rows O alone takes 192, and 32 keys a step spill in the
// loop.
template <>
struct ForwardTileSm80<192> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// O takes 128 registers, Q 64, S 16. Reading Q from shared memory for every 32 keys would take a quarter more of its
// bandwidth. 64 keys do not fit in 99 KB.
template <>
struct ForwardTileSm80<256> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// The forward kernel with every option. Options take registers, so a warp has 16 rows, and an SM one CTA. A step of 64
// keys, or 32 above 128 dims, takes fewer instructions per key than warps of 32 rows and half the keys, which spill in
// the loop with a bias. With up to 255 registers nothing spills.
//
// Keys in pages have instances of their own: a branch would cost the other instances instructions and, from 192 dims
// on, registers that they lack.
template <int kHeadDim>
struct ForwardOptionsTileSm80 {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
};

// The backward kernel on small tiles: with options, from 192 dims on, and where the large tiles below do not fit. Warps
// form groups that differ for each product: kRowWarpsOfS groups divide the rows of S and dP, kKeyWarps groups the keys
// of dK and dV, kRowWarpsOfQ groups the rows of dQ. The warps of a group divide the keys of S and dP, or the head dim.
// A warp has 32x32 of S and, at 128 dims, 32x64 of dK, dV and dQ. dP is computed for 16 keys at a time, and dQ for 32
// columns of a warp: otherwise dK and dV (128 registers) spill. This loads dO and dS twice. Two CTAs of 4 warps on an
// SM cover each other's waits. With options and up to 128 dims, 8 warps have half as much of S: registers of 4 would
// not suffice.
//
// Counts as above, of the kernel without options. Its loop holds the exponentials twice, for full and for masked tiles;
// a step executes one of the two.
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

// The backward kernel without options on large key tiles, up to 128 dims. Per key it adds half as often to dQ's sums as
// on small tiles, and P stays in registers. A warp has 32 keys and all dims of dV (value warps) or of dK (key warps).
// At 128 dims its registers do not hold both, nor 64 rows of S at a time. From 96 dims on the tiles take more than the
// 99 KB of some GPUs.
//
// Counts are per 64 rows by 64 keys: half the sum of a value warp's and a key warp's step. "instructions" are those
// that a full step executes in the middle of a head, "loops" those of both whole loops, with masks and the ends of
// heads.
//
// Large backward: head dim  instructions  loops  HMMA  MUFU.EX2  LDSM  RED  registers  shared-KB
//                      32           396    702    80        32    40    8        128         66
//                      64           532    942   160        32    68   16        192         98
//                      96           638   1120   240        32    96   24        241        130
//                     128           782   1342   320        32   124   32        255        162
//
// On small tiles these are 620, 742, 900 and 1067 instructions, and 16, 32, 48 and 64 REDs. FlashAttention-2's kernels
// take 563 and 891 instructions at 64 and 128 dims. Two variants gained nothing in a simulation: two value warps for
// each 32 keys (12 warps in all), and Pᵀ·dO after dSᵀ is in shared memory.
template <int kHeadDim>
struct BackwardLargeTileSm80 {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = kHeadDim == 32 ? 2 : 1;
    static constexpr bool kFitsEverywhere = kHeadDim <= 64;  // in 99 KB
};

}  // namespace fastattn
