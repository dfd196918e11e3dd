// wgmma: products of a warpgroup (four warps, 64 rows), which run asynchronously. PTX ISA, "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Instructions".
//
// Sums of a thread: d[4 * n + e] is element [16 * warp + lane / 4 + 8 * (e / 2)][8 * n + 2 * (lane % 4) + e % 2], as in
// mma.m16n8k16. Until a thread has waited for a product's group, it may not touch the product's sums or its operand A.
#pragma once

#include <cstdint>

#include "host/params.h"

namespace fastattn::ptx {

// Orders earlier uses of the registers of sums and operands before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kInFlight groups, the latest ones, are in flight.
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// Tells the compiler that these registers change here, so that it reads a product's sums only after the wait.
__device__ __forceinline__ void written_by_wgmma(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

__device__ __forceinline__ void written_by_wgmma(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void written_by_wgmma(int32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

template <typename Part, int kCount>
__device__ __forceinline__ void written_by_wgmma(Part (&values)[kCount]) {
#pragma unroll
    for (Part& value : values) written_by_wgmma(value);
}

// Operand lists. Inline PTX numbers its operands: sums first, then the others.
#define FASTATTN_SUMS_8(d, i)                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define FASTATTN_SUMS_16(d, i) FASTATTN_SUMS_8(d, i), FASTATTN_SUMS_8(d, i + 8)
#define FASTATTN_SUMS_32(d, i) FASTATTN_SUMS_16(d, i), FASTATTN_SUMS_16(d, i + 16)
#define FASTATTN_SUMS_64(d, i) FASTATTN_SUMS_32(d, i), FASTATTN_SUMS_32(d, i + 32)
#define FASTATTN_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FASTATTN_NAMES_16 FASTATTN_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTATTN_NAMES_24 FASTATTN_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FASTATTN_NAMES_32 FASTATTN_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTATTN_NAMES_40 FASTATTN_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FASTATTN_NAMES_48 FASTATTN_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTATTN_NAMES_56 FASTATTN_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FASTATTN_NAMES_64 FASTATTN_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTATTN_NAMES_72 FASTATTN_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FASTATTN_NAMES_80 FASTATTN_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FASTATTN_NAMES_88 FASTATTN_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FASTATTN_NAMES_96 FASTATTN_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FASTATTN_NAMES_104 FASTATTN_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FASTATTN_NAMES_112 FASTATTN_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FASTATTN_NAMES_120 FASTATTN_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FASTATTN_NAMES_128 FASTATTN_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FASTATTN_ALL_SUMS_32 FASTATTN_SUMS_32(d, 0)
#define FASTATTN_ALL_SUMS_40 FASTATTN_SUMS_32(d, 0), FASTATTN_SUMS_8(d, 32)
#define FASTATTN_ALL_SUMS_48 FASTATTN_SUMS_32(d, 0), FASTATTN_SUMS_16(d, 32)
#define FASTATTN_ALL_SUMS_56 FASTATTN_SUMS_32(d, 0), FASTATTN_SUMS_16(d, 32), FASTATTN_SUMS_8(d, 48)
#define FASTATTN_ALL_SUMS_64 FASTATTN_SUMS_64(d, 0)
#define FASTATTN_ALL_SUMS_72 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_8(d, 64)
#define FASTATTN_ALL_SUMS_80 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_16(d, 64)
#define FASTATTN_ALL_SUMS_88 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_16(d, 64), FASTATTN_SUMS_8(d, 80)
#define FASTATTN_ALL_SUMS_96 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_32(d, 64)
#define FASTATTN_ALL_SUMS_112 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_32(d, 64), FASTATTN_SUMS_16(d, 96)
#define FASTATTN_ALL_SUMS_128 FASTATTN_SUMS_64(d, 0), FASTATTN_SUMS_64(d, 64)

// m64nNk16 of 16-bit operands into fp32: d = A * B, or d += A * B. ss: both from shared memory, A [M, K] and B [N, K],
// with K contiguous. ss_columns: both from shared memory, A [K, M] and B [K, N], with M and N contiguous. rs: A from
// registers, B [K, N] from shared memory, with N contiguous. rs_rows: the same with B [N, K], K contiguous.
template <int kN, DataType kDataType>
struct Wgmma;

#define FASTATTN_WGMMA(kN, kDataType, kType, i0, i1, i2, i3, i4, i5)                                                   \
    template <>                                                                                                        \
    struct Wgmma<kN, DataType::kDataType> {                                                                            \
        __device__ __forceinline__ static void ss(float (&d)[i0], uint64_t a, uint64_t b, bool adds) {                 \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kN  \
                         "k16.f32." kType "." kType " {" FASTATTN_NAMES_##i0 "}, %" #i0 ", %" #i1                      \
                                                                             ", adds, 1, 1, 0, 0;\n}"                  \
                         : FASTATTN_ALL_SUMS_##i0                                                                      \
                         : "l"(a), "l"(b), "r"(int{adds}));                                                            \
        }                                                                                                              \
        __device__ __forceinline__ static void ss_columns(float (&d)[i0], uint64_t a, uint64_t b, bool adds) {         \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kN  \
                         "k16.f32." kType "." kType " {" FASTATTN_NAMES_##i0 "}, %" #i0 ", %" #i1                      \
                                                                             ", adds, 1, 1, 1, 1;\n}"                  \
                         : FASTATTN_ALL_SUMS_##i0                                                                      \
                         : "l"(a), "l"(b), "r"(int{adds}));                                                            \
        }                                                                                                              \
        __device__ __forceinline__ static void rs(float (&d)[i0], const uint32_t (&a)[4], uint64_t b, bool adds) {     \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kN  \
                         "k16.f32." kType "." kType " {" FASTATTN_NAMES_##i0 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 \
                                                                             "}, %" #i4 ", adds, 1, 1, 1;\n}"          \
                         : FASTATTN_ALL_SUMS_##i0                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{adds}));                        \
        }                                                                                                              \
        __device__ __forceinline__ static void rs_rows(float (&d)[i0], const uint32_t (&a)[4], uint64_t b,             \
                                                       bool adds) {                                                    \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kN  \
                         "k16.f32." kType "." kType " {" FASTATTN_NAMES_##i0 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 \
                                                                             "}, %" #i4 ", adds, 1, 1, 0;\n}"          \
                         : FASTATTN_ALL_SUMS_##i0                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{adds}));                        \
        }                                                                                                              \
    };
#define FASTATTN_WGMMA_OF_BOTH(kN, ...)              \
    FASTATTN_WGMMA(kN, kFloat16, "f16", __VA_ARGS__) \
    FASTATTN_WGMMA(kN, kBFloat16, "bf16", __VA_ARGS__)

FASTATTN_WGMMA_OF_BOTH(64, 32, 33, 34, 35, 36, 37)
FASTATTN_WGMMA_OF_BOTH(80, 40, 41, 42, 43, 44, 45)
FASTATTN_WGMMA_OF_BOTH(96, 48, 49, 50, 51, 52, 53)
FASTATTN_WGMMA_OF_BOTH(112, 56, 57, 58, 59, 60, 61)
FASTATTN_WGMMA_OF_BOTH(128, 64, 65, 66, 67, 68, 69)
FASTATTN_WGMMA_OF_BOTH(144, 72, 73, 74, 75, 76, 77)
FASTATTN_WGMMA_OF_BOTH(160, 80, 81, 82, 83, 84, 85)
FASTATTN_WGMMA_OF_BOTH(176, 88, 89, 90, 91, 92, 93)
FASTATTN_WGMMA_OF_BOTH(192, 96, 97, 98, 99, 100, 101)
FASTATTN_WGMMA_OF_BOTH(224, 112, 113, 114, 115, 116, 117)
FASTATTN_WGMMA_OF_BOTH(256, 128, 129, 130, 131, 132, 133)

#undef FASTATTN_WGMMA_OF_BOTH
#undef FASTATTN_WGMMA

#define FASTATTN_INTEGERS_8(d, i)                                                                               \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
        "+r"(d[i + 7])
#define FASTATTN_INTEGERS_32(d, i)                                                            \
    FASTATTN_INTEGERS_8(d, i), FASTATTN_INTEGERS_8(d, i + 8), FASTATTN_INTEGERS_8(d, i + 16), \
        FASTATTN_INTEGERS_8(d, i + 24)
#define FASTATTN_ALL_INTEGERS_32 FASTATTN_INTEGERS_32(d, 0)
#define FASTATTN_ALL_INTEGERS_64 FASTATTN_ALL_INTEGERS_32, FASTATTN_INTEGERS_32(d, 32)
#define FASTATTN_ALL_INTEGERS_96 FASTATTN_ALL_INTEGERS_64, FASTATTN_INTEGERS_32(d, 64)
#define FASTATTN_ALL_INTEGERS_128 FASTATTN_ALL_INTEGERS_96, FASTATTN_INTEGERS_32(d, 96)

// m64nNk32 of int8 operands into int32. ss: both from shared memory, [M, K] and [N, K]. int8 operands must have K
// contiguous.
template <int kN>
struct WgmmaS8;

#define FASTATTN_WGMMA_S8(kN, i0, i1, i2)                                                                             \
    template <>                                                                                                       \
    struct WgmmaS8<kN> {                                                                                              \
        __device__ __forceinline__ static void ss(int32_t (&d)[i0], uint64_t a, uint64_t b, bool adds) {              \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #kN \
                         "k32.s32.s8.s8 {" FASTATTN_NAMES_##i0 "}, %" #i0 ", %" #i1 ", adds;\n}"                      \
                         : FASTATTN_ALL_INTEGERS_##i0                                                                 \
                         : "l"(a), "l"(b), "r"(int{adds}));                                                           \
        }                                                                                                             \
    };

FASTATTN_WGMMA_S8(64, 32, 33, 34)
FASTATTN_WGMMA_S8(128, 64, 65, 66)
FASTATTN_WGMMA_S8(192, 96, 97, 98)
FASTATTN_WGMMA_S8(256, 128, 129, 130)

#undef FASTATTN_WGMMA_S8

}  // namespace fastattn::ptx
