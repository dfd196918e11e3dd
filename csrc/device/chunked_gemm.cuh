// Computes A·Bᵀ with a CTA of kWarpsM x kWarpsN warps. The rows of A and B have 16-bit elements, and their length
// (head_dim) is known only at run time. Chunks of 64 dims pass through two stages of shared memory: while one chunk is
// multiplied, the copy of the next chunk is in flight.
//
//   copy     c0 | c1        c2        c0 of the next product …
//   multiply    | c0        c1        c2
//
// For 16 dims, a warp's tile of 32 x 32 takes 4 ldmatrix.x4 and 8 MMAs. Shared memory, at 128 bytes a clock, delivers 4
// ldmatrix.x4 in the time that the tensor cores of sm_80 take for 8 MMAs. A tile of 16 x 64 would take 5 ldmatrix.x4.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// Rows in global memory, aligned like the rows of a HeadsView. Rows from num_rows on count as zero, and are not read.
struct GemmRows {
    const uint16_t* data;
    int64_t row_stride;
    int32_t num_rows;
};

// A [kBlockM, head_dim] and B [kBlockN, head_dim]. head_dim = 0: there is nothing to multiply.
struct GemmOperands {
    GemmRows a, b;
    int32_t head_dim = 0;
};

template <DataType kDataType, int kWarpsM, int kWarpsN, int kTilesM, int kTilesN>
class ChunkedGemm {
  public:
    static constexpr int kBlockM = kWarpsM * kTilesM * kMmaM;
    static constexpr int kBlockN = kWarpsN * kTilesN * kMmaN;
    static constexpr int kNumThreads = kWarpsM * kWarpsN * kWarpSize;
    static constexpr int kChunkDims = 64;
    static constexpr int kStages = 2;

    struct alignas(128) Storage {
        uint16_t sA[kStages][kBlockM * kChunkDims];  // swizzled
        uint16_t sB[kStages][kBlockN * kChunkDims];  // swizzled
    };

    const int warp_row, warp_column;  // where this warp's rows and columns begin in the tile

    // thread: its index in the CTA. Neighbouring warps compute neighbouring columns of the same rows.
    FASTATTN_DEVICE ChunkedGemm(Storage& shared, int thread)
        : warp_row(thread / kWarpSize / kWarpsN * kTilesM * kMmaM),
          warp_column(thread / kWarpSize % kWarpsN * kTilesN * kMmaN),
          shared_(shared),
          thread_(thread) {}

    // Starts the first copies. Called before the first multiply().
    FASTATTN_DEVICE void start(const GemmOperands& first) {
        load(first, 0);
        ptx::cp_async_commit_group();
    }

    // Computes this warp's tiles of A·Bᵀ, and starts to load `next`. `operands`: what the previous call got as `next`,
    // or what start() got. After the last call, other warps may still be reading the storage.
    FASTATTN_DEVICE void multiply(float (&rS)[kTilesM][kTilesN][4], const GemmOperands& operands,
                                  const GemmOperands& next) {
        set_zero(rS);
#pragma unroll 1
        for (int32_t dim = 0; dim < operands.head_dim; dim += kChunkDims) {
            ptx::cp_async_wait_group<0>();  // waits for this thread's copies of the chunk
            __syncthreads();  // waits for every thread's copies, and until every warp has read the chunk before
            const int stage = stage_;
            stage_ ^= 1;
            if (dim + kChunkDims < operands.head_dim) {
                load(operands, dim + kChunkDims);
            } else {
                load(next, 0);
            }
            ptx::cp_async_commit_group();
            multiply_chunk(rS, stage, operands.head_dim - dim);
        }
    }

  private:
    Storage& shared_;
    const int thread_;
    int stage_ = 0;  // of the chunk that was loaded last

    FASTATTN_DEVICE void load(const GemmOperands& operands, int32_t dim) {
        const int32_t num_dims = operands.head_dim - dim;
        if (num_dims <= 0) return;
        TileLoader<kBlockM, kChunkDims, kNumThreads> load_a(shared_.sA[stage_], operands.a.data + dim,
                                                            operands.a.row_stride, thread_, num_dims);
        TileLoader<kBlockN, kChunkDims, kNumThreads> load_b(shared_.sB[stage_], operands.b.data + dim,
                                                            operands.b.row_stride, thread_, num_dims);
        load_a.template load<true>(operands.a.num_rows);
        load_b.template load<true>(operands.b.num_rows);
    }

    FASTATTN_DEVICE void multiply_chunk(float (&rS)[kTilesM][kTilesN][4], int stage, int32_t num_dims) {
        const int lane = thread_ % kWarpSize;
        const SwizzledBlocks<kChunkDims> sA(shared_.sA[stage] + warp_row * kChunkDims, ldmatrix_lane(lane));
        const SwizzledBlocks<kChunkDims> sB(shared_.sB[stage] + warp_column * kChunkDims, ldmatrix_lane_b(lane));
#pragma unroll
        for (int k = 0; k < kChunkDims; k += kMmaK) {
            if (k >= num_dims) break;  // the rest is zero
            uint32_t rA[kTilesM][4];
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) ptx::ldmatrix_m8n8_x4(rA[m], sA.address(m * kMmaM, k));
#pragma unroll
            for (int n = 0; n < kTilesN; n += 2) {
                uint32_t rB[4];
                ptx::ldmatrix_m8n8_x4(rB, sB.address(n * kMmaN, k));
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) {
                    mma_m16n8k16<kDataType>(rS[m][n], rA[m], rB[0], rB[1]);
                    mma_m16n8k16<kDataType>(rS[m][n + 1], rA[m], rB[2], rB[3]);
                }
            }
        }
    }
};

}  // namespace fastattn
