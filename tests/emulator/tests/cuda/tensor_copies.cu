// Kernels with tensor copies in CUDA C++: cuda::ptx, cuda::barrier with cuda::device::experimental, and clusters.
#include <cooperative_groups.h>
#include <cuda.h>

#include <cuda/barrier>
#include <cuda/ptx>

namespace cg = cooperative_groups;
namespace cde = cuda::device::experimental;
namespace ptx = cuda::ptx;

constexpr int kRows = 32, kColumns = 64, kStages = 3, kConsumers = 128;  // a row of a tile has 128 bytes
constexpr int kTileBytes = kRows * kColumns * 2;

enum Omitted { kNothing, kWaitForEmpty, kProxyFence, kHalfOfTheBytes, kWaitForRead };

// Returns an element of a tile that was copied with the 128-byte swizzle.
__device__ uint16_t& element(uint16_t* tile, int row, int column) {
    return tile[row * kColumns + ((column / 8 ^ row % 8) * 8 + column % 8)];
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// out = in + 1: one warp loads a column of tiles through a ring of stages; four warps add and store.
template <int kOmitted>
__device__ void pipeline(const CUtensorMap& in, const CUtensorMap& out, int tiles) {
    extern __shared__ __align__(1024) uint8_t shared[];
    auto* loaded = reinterpret_cast<uint16_t*>(shared);
    uint16_t* stored = loaded + kStages * kRows * kColumns;
    __shared__ uint64_t full[kStages], empty[kStages];
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&full[i], 1), ptx::mbarrier_init(&empty[i], kConsumers);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    const int x = blockIdx.x * kColumns;
    if (threadIdx.x >= kConsumers) {
        if (threadIdx.x != kConsumers) return;
        for (int t = 0; t < tiles; ++t) {
            const int stage = t % kStages;
            if (kOmitted != kWaitForEmpty) wait(&empty[stage], (t / kStages & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[stage],
                                           kOmitted == kHalfOfTheBytes ? kTileBytes / 2 : kTileBytes);
            const int32_t at[] = {x, t * kRows};
            ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, loaded + stage * kRows * kColumns, &in, at,
                                      &full[stage]);
        }
        return;
    }
    for (int t = 0; t < tiles; ++t) {
        const int stage = t % kStages;
        uint16_t *from = loaded + stage * kRows * kColumns, *to = stored + t % 2 * kRows * kColumns;
        if (threadIdx.x == 0 && kOmitted != kWaitForRead) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
        asm volatile("bar.sync 1, 128;" ::: "memory");
        wait(&full[stage], t / kStages & 1);
        for (int i = threadIdx.x; i < kRows * kColumns; i += kConsumers) {
            element(to, i / kColumns, i % kColumns) = element(from, i / kColumns, i % kColumns) + 1;
        }
        if (kOmitted != kProxyFence) ptx::fence_proxy_async(ptx::space_shared);
        ptx::mbarrier_arrive(&empty[stage]);
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (threadIdx.x == 0) {
            const int32_t at[] = {x, t * kRows};
            ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &out, at, to);
            ptx::cp_async_bulk_commit_group();
        }
    }
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}

#define PIPELINE(name, omitted)                                                                                      \
    extern "C" __global__ void name(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out, \
                                    int tiles) {                                                                     \
        pipeline<omitted>(in, out, tiles);                                                                           \
    }
PIPELINE(pipelined, kNothing)
PIPELINE(without_wait_for_empty, kWaitForEmpty)
PIPELINE(without_proxy_fence, kProxyFence)
PIPELINE(with_half_of_the_bytes, kHalfOfTheBytes)
PIPELINE(without_wait_for_read, kWaitForRead)

// out += in, tile by tile, with the barriers of libcu++.
extern "C" __global__ void accumulated(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out,
                                       int tiles) {
    __shared__ alignas(128) float tile[8][32];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    if (threadIdx.x == 0) {
        init(&barrier, blockDim.x);
        cde::fence_proxy_async_shared_cta();
    }
    __syncthreads();
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        cuda::barrier<cuda::thread_scope_block>::arrival_token token;
        if (threadIdx.x == 0) {
            cde::cp_async_bulk_tensor_2d_global_to_shared(&tile, &in, 0, t * 8, barrier);
            token = cuda::device::barrier_arrive_tx(barrier, 1, sizeof(tile));
        } else {
            token = barrier.arrive();
        }
        barrier.wait(std::move(token));
        for (int i = threadIdx.x; i < 256; i += blockDim.x) tile[i / 32][i % 32] *= 2;
        cde::fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            const int32_t at[] = {0, 0};
            ptx::cp_reduce_async_bulk_tensor(ptx::space_global, ptx::space_shared, ptx::op_add, &out, at, &tile);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
        }
        __syncthreads();
    }
}

// Each CTA of a cluster loads some of the rows for all CTAs, and stores its copy plus its neighbour's plus its rank.
extern "C" __global__ void shared_by_cluster(const __grid_constant__ CUtensorMap in, float* out) {
    __shared__ alignas(128) float rows[32][32];
    __shared__ uint64_t barrier;
    const auto cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), parts = cluster.num_blocks(), part = 32 / parts;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, sizeof(rows));
    }
    cluster.sync();
    if (threadIdx.x == 0) {
        const int32_t at[] = {0, static_cast<int32_t>(rank * part)};
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, &rows[rank * part], &in, at, &barrier,
                                  static_cast<uint16_t>((1 << parts) - 1));
    }
    wait(&barrier, 0);
    cluster.sync();  // the neighbour's rows have landed too
    const float* other = cluster.map_shared_rank(&rows[0][0], (rank + 1) % parts);
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[blockIdx.x * 1024 + i] = rows[0][i] + other[i] + rank;
    cluster.sync();
}
