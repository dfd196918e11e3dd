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
// kDirection: whether the tile after this one is the one below (1) or above (-1) it.
template <int kRows, int kHeadDim, int kThreads, int kDirection = -1>
struct TileLoader {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kNumRows = kRows;
    static constexpr int kRowsPerPass = kThreads / Layout::kChunksPerRow;
    static constexpr int kPasses = kRows / kRowsPerPass;
    static constexpr int kPassBytes = kRowsPerPass * Layout::kRowBytes;
    static constexpr int kNoRow = 1 << 30;
    static_assert(kRowsPerPass % kSwizzleRows == 0 || kRowsPerPass * 2 == kSwizzleRows,
                  "a thread's chunks must share one swizzled column, or two in turn");
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

    // The tile to load next starts so many elements further on.
    __device__ __forceinline__ void skip(int64_t elements) { gChunk += elements; }

    // Starts to copy a tile, and goes on to the next. kPartial: only the first num_rows rows exist; the others become
    // zero, and are not read.
    template <bool kPartial>
    __device__ __forceinline__ void load(int num_rows) {
        const uint32_t destination = shared_address(sChunk);
        const uint16_t* global = gChunk;
        const int rows_from_here = num_rows - row;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            if constexpr (kPartial) {
                const bool exists = pass * kRowsPerPass < rows_from_here;
                ptx::cp_async_cg_16(in_pass(destination, pass), global, exists ? kChunkBytes : 0);
            } else {
                ptx::cp_async_cg_16(in_pass(destination, pass), global);
            }
            global += kRowsPerPass * row_stride;
        }
        gChunk += kDirection * kRows * row_stride;
    }

    // Calls function(uint32_t& pair_of_elements) for all that this thread has copied.
    template <typename Function>
    __device__ __forceinline__ void for_own_pairs(Function&& function) const {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            uint4& bits = *reinterpret_cast<uint4*>(in_pass(reinterpret_cast<uintptr_t>(sChunk), pass));
            uint4 pairs = bits;
            function(pairs.x);
            function(pairs.y);
            function(pairs.z);
            function(pairs.w);
            bits = pairs;
        }
    }

  private:
    // Where a thread's chunk of a pass goes, from that of the first: straight below it, but for the swizzle.
    template <typename Address>
    __device__ __forceinline__ static Address in_pass(Address first, int pass) {
        return (first ^ (pass * kRowsPerPass % kSwizzleRows * kChunkBytes)) + pass * kPassBytes;
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

// Rounds a tile of scores, whose upper left element is [first_row][first_column] of [*, kColumns], to 16 bits.
template <DataType kDataType, int kColumns, int kTilesM, int kTilesN>
__device__ __forceinline__ void stage_scores(uint16_t* sTile, const float (&rS)[kTilesM][kTilesN][4], int first_row,
                                             int first_column, int lane) {
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            const uint32_t offset = Swizzle<kColumns>::offset(first_row + row, first_column / kChunkElements + n);
            reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(sTile) + offset)[lane % kLanesPerRow] =
                pack<kDataType>(rS[m][n][2 * half], rS[m][n][2 * half + 1]);
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
