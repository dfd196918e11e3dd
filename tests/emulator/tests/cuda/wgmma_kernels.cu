// Kernels in the style of fast Hopper kernels, for test_wgmma_kernels.py: matrix multiplications that are in flight
// while the next operands are copied, and attention that computes the next scores during this step's softmax.
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr int kDepth = 64;                   // elements of a tile's row: 128 bytes, one row of the swizzle pattern
constexpr int kTileBytes = 64 * 2 * kDepth;  // 64 rows

__device__ void fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Returns the descriptor of a tile of 64 rows of 128 bytes with the 128-byte swizzle.
__device__ uint64_t describe(uint32_t address) {
    return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

#define SUMS_8(d, i)                                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define SUMS(d) SUMS_8(d, 0), SUMS_8(d, 8), SUMS_8(d, 16), SUMS_8(d, 24)
#define NAMES                                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"

// d[64, 64] (+)= a[64, 16] b[64, 16]^T
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES ", %32, %33, p, 1, 1, 0, 0; }"
        : SUMS(d)
        : "l"(a), "l"(b), "r"(adds));
}
// d[64, 64] += a[64, 16] b[16, 64], a in registers
__device__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUMS(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Copies 64 rows of 64 elements, `stride` apart, into a swizzled tile.
__device__ void copy_tile(const __nv_bfloat16* from, int stride, unsigned char* tile) {
    for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x) {
        const int row = i / 8, unit = i % 8;
        *reinterpret_cast<uint4*>(tile + row * 128 + (unit ^ row % 8) * 16) =
            *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(row) * stride + unit * 8);
    }
}
// Makes all threads' writes to shared memory visible to wgmma.
__device__ void publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

__device__ uint32_t address_of(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ void store(float* out, int stride, const float (&d)[32]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < 32; ++i) out[(row + i / 2 % 2 * 8) * stride + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

}  // namespace

// c = a b^T, one 64 x 64 tile per CTA. Two groups of wgmma are in flight; a tile is overwritten when its group is done.
extern "C" __global__ void __launch_bounds__(128)
    gemm(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n, int depth) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kStages = 3;
    a += static_cast<int64_t>(blockIdx.x) * 64 * depth, b += static_cast<int64_t>(blockIdx.y) * 64 * depth;
    float sums[32] = {};
    for (int step = 0; step < depth / kDepth; ++step) {
        unsigned char* tile = shared + step % kStages * 2 * kTileBytes;
        copy_tile(a + step * kDepth, depth, tile);
        copy_tile(b + step * kDepth, depth, tile + kTileBytes);
        publish();
        fence();
        for (int k = 0; k < kDepth / 16; ++k) {
            multiply(sums, describe(address_of(tile) + k * 32), describe(address_of(tile + kTileBytes) + k * 32), 1);
        }
        commit();
        wait<1>();
    }
    wait<0>();
    store(c + static_cast<int64_t>(blockIdx.x) * 64 * n + blockIdx.y * 64, n, sums);
}

// out = softmax(q k^T) v for 64 queries per CTA and head dimension 64, with base-2 exponentials.
extern "C" __global__ void __launch_bounds__(128)
    attention(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, float* out, int steps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *q_tile = shared, *k_tiles = shared + kTileBytes, *v_tiles = k_tiles + 2 * kTileBytes;
    constexpr int kTileElements = 64 * kDepth;
    copy_tile(q + static_cast<int64_t>(blockIdx.x) * kTileElements, kDepth, q_tile);
    copy_tile(k, kDepth, k_tiles);
    copy_tile(v, kDepth, v_tiles);
    publish();
    float scores[32], sums[32] = {}, most[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
    uint32_t p[16];
    const auto start_scores = [&](float (&into)[32], const unsigned char* tile) {
        for (int i = 0; i < 4; ++i)
            multiply(into, describe(address_of(q_tile) + i * 32), describe(address_of(tile) + i * 32), i > 0);
        commit();
    };
    // Replaces scores by exponentials, and sets the factors by which the sums so far must be multiplied.
    const auto softmax = [&](float (&s)[32], float (&scale)[2]) {
        for (int half = 0; half < 2; ++half) {
            float m = most[half];
            for (int i = 0; i < 32; ++i) {
                if (i / 2 % 2 == half) m = fmaxf(m, s[i]);
            }
            for (int lane = 1; lane < 4; lane *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lane));
            scale[half] = exp2f(most[half] - m);
            most[half] = m;
            total[half] *= scale[half];
            for (int i = 0; i < 32; ++i) {
                if (i / 2 % 2 == half) s[i] = exp2f(s[i] - m), total[half] += s[i];
            }
        }
    };
    const auto pack = [&](const float (&s)[32]) {
        for (int i = 0; i < 16; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(s[2 * i], s[2 * i + 1]);
            p[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
    };
    float scale[2];
    fence();
    start_scores(scores, k_tiles);
    wait<0>();
    softmax(scores, scale);
    pack(scores);
    for (int step = 1; step <= steps; ++step) {
        float next[32];
        __syncthreads();  // all warps have finished with the tiles that are overwritten next
        if (step < steps) {
            copy_tile(k + static_cast<int64_t>(step) * kTileElements, kDepth, k_tiles + step % 2 * kTileBytes);
            copy_tile(v + static_cast<int64_t>(step) * kTileElements, kDepth, v_tiles + step % 2 * kTileBytes);
        }
        publish();
        fence();
        if (step < steps) start_scores(next, k_tiles + step % 2 * kTileBytes);
        // Columns of P's fragments are rows of V, which are contiguous: N-major.
        for (int i = 0; i < 4; ++i) {
            multiply(sums, p + 4 * i, describe(address_of(v_tiles + (step - 1) % 2 * kTileBytes) + i * 2048));
        }
        commit();
        if (step < steps) {
            wait<1>();
            softmax(next, scale);
        }
        wait<0>();
        if (step < steps) {
            for (int i = 0; i < 32; ++i) sums[i] *= scale[i / 2 % 2];
            pack(next);
        }
    }
    for (int half = 0; half < 2; ++half) {
        for (int lane = 1; lane < 4; lane *= 2) total[half] += __shfl_xor_sync(~0u, total[half], lane);
    }
    for (int i = 0; i < 32; ++i) sums[i] /= total[i / 2 % 2];
    store(out + static_cast<int64_t>(blockIdx.x) * kTileElements, kDepth, sums);
}
