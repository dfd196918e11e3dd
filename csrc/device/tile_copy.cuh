// A CTA's copies of tiles [kRows, kHeadDim] of 16-bit elements into swizzled shared memory, and a warp's copies out.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

template <typename Element>
__device__ __forceinline__ Element* row_pointer(const HeadsView<Element>& view, int32_t batch, int32_t head,
                                                int32_t row) {
    return view.data + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
}

__device__ __forceinline__ float* row_pointer(const RowsView& view, int32_t batch, int32_t head) {
    return view.data + batch * view.batch_stride + head * view.head_stride;
}

// The tiles of one tensor, copied one after the other into one place. Each thread copies one chunk of every
// kRowsPerPass-th row, so that neighbouring threads touch neighbouring chunks. A thread always has the same chunks of a
// tile, and may look at them before the barrier that shares the tile.
template <int kRows, int kHeadDim, int kThreads>
struct TileLoader {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kNumRows = kRows;
    static constexpr int kRowsPerPass = kThreads / Layout::kChunksPerRow;
    static constexpr int kPasses = kRows / kRowsPerPass;
    static constexpr int kPassBytes = kRowsPerPass * Layout::kRowBytes;
    static constexpr int kNoRow = 1 << 30;
    static_assert(kRowsPerPass % kSwizzleRows == 0, "a thread's chunks must share one swizzled column");
    static_assert(kRows % kRowsPerPass == 0, "passes must cover the tile exactly");

    int row;                 // of the tile, of this thread's first chunk; kNoRow: it has none
    char* sChunk;            // where that chunk goes
    const uint16_t* gChunk;  // where it comes from, in the tile to load next
    int64_t row_stride;

    // The first tile to load starts at gTile. Its rows have head_dim elements; what is beyond becomes zero in tiles that
    // are loaded as kPartial.
    __device__ __forceinline__ TileLoader(uint16_t* sTile, const uint16_t* gTile, int64_t row_stride, int thread,
                                          int head_dim = kHeadDim)
        : row(thread / Layout::kChunksPerRow), row_stride(row_stride) {
        const int chunk = thread % Layout::kChunksPerRow;
        sChunk = reinterpret_cast<char*>(sTile) + Layout::offset(row, chunk);
        gChunk = gTile + row * row_stride + chunk * kChunkElements;
        if (chunk * kChunkElements >= head_dim) row = kNoRow;
    }

    // Starts to copy a tile, and goes back by one. kPartial: only the first num_rows rows exist; the others become
    // zero, and are not read.
    template <bool kPartial>
    __device__ __forceinline__ void load(int num_rows) {
        const uint32_t destination = shared_address(sChunk);
        const uint16_t* global = gChunk;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            if constexpr (kPartial) {
                const bool exists = row + pass * kRowsPerPass < num_rows;
                ptx::cp_async_cg_16(destination + pass * kPassBytes, global, exists ? kChunkBytes : 0);
            } else {
                ptx::cp_async_cg_16(destination + pass * kPassBytes, global);
            }
            global += kRowsPerPass * row_stride;
        }
        gChunk -= kRows * row_stride;
    }

    // Calls function(uint32_t& pair_of_elements) for all that this thread has copied.
    template <typename Function>
    __device__ __forceinline__ void for_own_pairs(Function&& function) const {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            uint4& bits = *reinterpret_cast<uint4*>(sChunk + pass * kPassBytes);
            uint4 pairs = bits;
            function(pairs.x);
            function(pairs.y);
            function(pairs.z);
            function(pairs.w);
            bits = pairs;
        }
    }
};

// Rounds a warp's accumulators to 16 bits, into its own rows of a tile in shared memory.
template <DataType kDataType, int kTilesM, int kTilesD>
__device__ __forceinline__ void stage_rows(uint16_t* sRows, const float (&rO)[kTilesM][kTilesD][4], int lane) {
    using Layout = Swizzle<kTilesD * kMmaN>;
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
            char* chunk = reinterpret_cast<char*>(sRows) + Layout::offset(row, d);
            reinterpret_cast<uint32_t*>(chunk)[lane % kLanesPerRow] =
                pack<kDataType>(rO[m][d][2 * half], rO[m][d][2 * half + 1]);
        }
    });
}

// Copies a warp's own [kRows, kHeadDim] rows from shared memory to global memory, as far as they exist.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void store_rows(uint16_t* gRows, int64_t row_stride, int num_rows, const uint16_t* sRows,
                                           int lane, int head_dim = kHeadDim) {
    using Layout = Swizzle<kHeadDim>;
    constexpr int kRowsPerPass = kWarpSize / Layout::kChunksPerRow;
    const int chunk = lane % Layout::kChunksPerRow;
#pragma unroll
    for (int first_row = 0; first_row < kRows; first_row += kRowsPerPass) {
        const int row = first_row + lane / Layout::kChunksPerRow;
        if (row < num_rows && chunk * kChunkElements < head_dim) {
            const char* source = reinterpret_cast<const char*>(sRows) + Layout::offset(row, chunk);
            *reinterpret_cast<uint4*>(gRows + row * row_stride + chunk * kChunkElements) =
                *reinterpret_cast<const uint4*>(source);
        }
    }
}

}  // namespace fastattn
