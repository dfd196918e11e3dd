// Tile sizes of the attention kernels for sm_80. A new head dim needs entries here, and its number in instances.json.
#pragma once

namespace fastattn {

// A warp owns 32 query rows if O fits in registers: each ldmatrix of K or V then feeds two rows of MMA tiles. With 16
// rows, the tensor cores would need 128 bytes of shared memory per clock, the whole bandwidth of sm_80. Q stays in
// registers if there are enough (kQueryInRegisters).
template <int kHeadDim, bool kFewKeys = false>
struct ForwardTileSm80;

// The counts below are of the SASS for sm_80 (nvcc 13.0), per warp and unmasked step: the warp's rows by kBlockN keys.
// tests/machine_code/test_native_library.py checks them. No loop accesses local memory. The counts of the forward
// kernel include two branches: rescaling O, which few steps do, and tracking the largest score (about 35 instructions).
//
// Forward: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                32           536    64        68    16        168         16
//                64           662   128        68    32        240         32
//                96           798   192        68    60        255         48
//               128           926   256        68    80        255         64
//               192           653   192        34    96        255         96
//               256           510   128        18    64        255         96
//
// Forward, few keys: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                         128           592   128        36    48        255         48

// Three CTAs run on an SM, because EX2 and the other instructions take as long as the products, and only the products
// of other warps hide them. With four CTAs (128 registers), the loop spills. kBlockN = 128 takes 10% fewer instructions
// per key, but only two CTAs then fit on an SM.
template <>
struct ForwardTileSm80<32> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 3;
    static constexpr bool kQueryInRegisters = true;
};

// kBlockN = 96 and 112 take 7% and 8% fewer instructions per key. But they mask up to 95 and 111 columns at the end of
// every sequence, and more columns along the diagonal of a causal mask. With three CTAs on an SM (168 registers), the
// loop spills.
template <>
struct ForwardTileSm80<64> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = true;
};

// Two CTAs also fit on GPUs with 99 KB of shared memory for CTAs. With Q in registers, the loop spills.
template <>
struct ForwardTileSm80<96> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = false;
};

// O takes 128 registers, S 64. Two CTAs fit in an SM's registers and, if it has 164 KB or more, in its shared memory.
// sm_86, sm_89 and sm_120 have 100 KB, in which two CTAs with kFewKeys fit. One CTA of four warps would leave the
// tensor cores idle while it computes a softmax.
template <bool kFewKeys>
struct ForwardTileSm80<128, kFewKeys> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = kFewKeys ? 32 : 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
    static constexpr bool kQueryInRegisters = false;
};

// Warps of 16 rows: O takes 96 registers, Q 48, S 32. With warps of 32 rows, O takes 192, and the loop spills even with
// only 32 keys a step.
template <>
struct ForwardTileSm80<192> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// O takes 128 registers, Q 64, S 16. If Q were read from shared memory for every 32 keys, a step would take a quarter
// more shared memory bandwidth. Tiles of 64 keys do not fit in 99 KB.
template <>
struct ForwardTileSm80<256> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr bool kQueryInRegisters = true;
};

// Tiles of the forward kernel with every option. Options take registers, so a warp has only 16 rows, an SM only one
// CTA, and a thread up to 255 registers, with which nothing spills. A step has 64 keys, or 32 above 128 dims. Warps of
// 32 rows with half as many keys take more instructions per key, and spill in the loop with a bias.
//
// Keys in pages have instances of their own (kPaged). A branch at run time would cost the other instances instructions
// and, from 192 dims on, registers that they do not have.
template <int kHeadDim>
struct ForwardOptionsTileSm80 {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = 1;
};

// Tiles of the backward kernel on small tiles, which is used with options, from 192 dims on, and where the large tiles
// below do not fit. How its warps form groups depends on the product. For S and dP, kRowWarpsOfS groups divide the
// rows, and the warps of a group divide the keys. For dK and dV, kKeyWarps groups divide the keys; for dQ, kRowWarpsOfQ
// groups divide the rows; in both cases the warps of a group divide the head dim. dP is computed for 16 keys at a time,
// and dQ for 32 of a warp's columns at a time, because otherwise dK and dV (128 registers at 256 dims) spill. So dO and
// dS are loaded twice.
//
// Above 128 dims, two CTAs of 4 warps run on an SM, so that one computes while the other waits. Up to 128 dims, a CTA
// has 8 warps: with options, 4 warps would not have enough registers, and where the large tiles do not fit, an SM has
// room for only one CTA. The kernel that rounds dQ divides its tiles among as many warps.
//
// The counts are defined as above, for the kernel without options. Its loop contains the exponentials twice, for full
// and for masked tiles, and the counts include both. A step executes only one of the two.
//
// Backward: head dim  instructions  HMMA  MUFU.EX2  LDSM  registers  shared-KB
//                 96           945   120        32    92        173         65
//                128          1070   160        32   112        199         81
//                192           941   120        16    86        239         53
//                256          1100   160        16   104        255         69

template <int kHeadDim>
struct BackwardTileSm80 {
    static constexpr int kBlockM = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = kHeadDim <= 128 ? 8 : 4;
    static constexpr int kRowWarpsOfS = 2;
    static constexpr int kKeyWarps = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kRowWarpsOfQ = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kMinCtasPerSm = kNumWarps == 8 ? 1 : 2;
};

// Tiles of the backward kernel on large key tiles, without options and up to 128 dims. For each key, it adds to dQ's
// sums half as often as on small tiles, and P stays in registers. A warp has 32 keys, and all dims of dV (value warps)
// or of dK (key warps). At 128 dims, a warp's registers hold neither both dV and dK, nor 64 rows of S at a time. From
// 96 dims on, a CTA takes more than the 99 KB of shared memory that some GPUs have.
//
// Counts are per 64 rows by 64 keys, to compare them with small tiles: half the sum of a value warp's and a key warp's
// step. "instructions" counts those that a full step executes in the middle of a head. "loops" counts all instructions
// of both loops, with masks and the code for the ends of heads.
//
// Large backward: head dim  instructions  loops  HMMA  MUFU.EX2  LDSM  RED  registers  shared-KB
//                      32           396    742    80        32    40    8        128         66
//                      64           532    982   160        32    68   16        193         98
//                      96           638   1156   240        32    96   24        242        130
//                     128           782   1382   320        32   124   32        255        162
//
// FlashAttention-2's kernels take 563 and 891 instructions at 64 and 128 dims. Two attempts gained nothing in a
// simulation: two value warps for each 32 keys (12 warps in all), and computing Pᵀ·dO after dSᵀ is in shared memory.
template <int kHeadDim>
struct BackwardLargeTileSm80 {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kNumWarps = 8;
    static constexpr int kMinCtasPerSm = kHeadDim == 32 ? 2 : 1;
    static constexpr bool kFitsEverywhere = kHeadDim <= 64;  // in the 99 KB of some GPUs
};

}  // namespace fastattn
