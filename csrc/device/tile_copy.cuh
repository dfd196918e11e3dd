// Copies tiles [kRows, kHeadDim] of 16-bit elements: into swizzled shared memory by a CTA, and out of it by a warp.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/swizzle.cuh"
#include "host/min_max.h"

namespace fastattn {

template <typename Element>
FASTATTN_DEVICE Element* row_pointer(const HeadsView<Element>& view, int32_t batch, int32_t head, int32_t row) {
    return view.data + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
}

FASTATTN_DEVICE float* row_pointer(const RowsView& view, int32_t batch, int32_t head) {
    return view.data + batch * view.batch_stride + head * view.head_stride;
}

// The chunks of a tile [kRows, kHeadDim] that one thread copies. A pass copies a rectangle of chunks: each thread
// copies one chunk, and neighbouring threads copy neighbouring chunks. A thread has the same chunks of every tile.
// After its own wait for its copies, it can read these chunks before the barrier that makes the tile visible to all
// threads. kDirection: whether the passes go down (1) or up (-1) the rows.
template <int kRows, int kHeadDim, int kThreads, int kDirection>
struct TileChunks {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kNumRows = kRows;
    // One period of a row, 64 or 128 bytes, or several periods if the tile has too few rows for all threads.
    static constexpr int kChunksPerPass = Layout::kPeriod * std::max(1, kThreads / Layout::kPeriod / kRows);
    static constexpr int kRowsPerPass = kThreads / kChunksPerPass;
    static constexpr int kRowPasses = kRows / kRowsPerPass;
    static_assert(kRowsPerPass % kSwizzleRows == 0, "a thread's chunks must share one swizzled column");
    static_assert(kRows % kRowsPerPass == 0 && Layout::kChunksPerRow % kChunksPerPass == 0,
                  "passes must cover the tile exactly");

    int head_dim;  // elements that a row has; zeros follow them
    char* sChunk;  // where this thread's first chunk goes

    FASTATTN_DEVICE TileChunks(uint16_t* sTile, int thread, int head_dim)
        : head_dim(head_dim),
          sChunk(reinterpret_cast<char*>(sTile) + Layout::offset(thread / kChunksPerPass, thread % kChunksPerPass)) {}

    // Calls function(uint32_t& pair_of_elements, index of the pair in its chunk) for all elements that this thread has
    // copied.
    template <typename Function>
    FASTATTN_DEVICE void for_own_pairs(Function&& function) const {
        for_own_chunks([&](int, int, char* chunk) { for_pairs_of_chunk(chunk, function); });
    }

  protected:
    FASTATTN_DEVICE static constexpr int row_pass(int i) { return kDirection > 0 ? i : kRowPasses - 1 - i; }

    // Calls function(first row of the pass, first chunk of the pass, this thread's chunk in shared memory) for each
    // pass.
    template <typename Function>
    FASTATTN_DEVICE void for_own_chunks(Function&& function) const {
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const int first_row = row_pass(i) * kRowsPerPass;
#pragma unroll
            for (int first_chunk = 0; first_chunk < Layout::kChunksPerRow; first_chunk += kChunksPerPass) {
                function(first_row, first_chunk, sChunk + first_row * Layout::kRowBytes + first_chunk * kChunkBytes);
            }
        }
    }
};

// Copies tiles of a tensor into a buffer, each over the previous tile. kDirection: whether the next tile is below (1)
// or above (-1) this tile.
template <int kRows, int kHeadDim, int kThreads, int kDirection = -1>
struct TileLoader : TileChunks<kRows, kHeadDim, kThreads, kDirection> {
    using Chunks = TileChunks<kRows, kHeadDim, kThreads, kDirection>;
    using Chunks::kChunksPerPass, Chunks::kRowsPerPass, Chunks::head_dim;
    using typename Chunks::Layout;

    const uint16_t* gChunk;  // where this thread's chunk comes from in the next pass
    int64_t pass_stride;

    // The first tile to load starts at gTile. Its rows have head_dim elements; the rest of kHeadDim becomes zero.
    FASTATTN_DEVICE TileLoader(uint16_t* sTile, const uint16_t* gTile, int64_t row_stride, int thread,
                               int head_dim = kHeadDim)
        : Chunks(sTile, thread, head_dim), pass_stride(kRowsPerPass * row_stride) {
        const int row = thread / kChunksPerPass, chunk = thread % kChunksPerPass;
        gChunk = gTile + row * row_stride + Chunks::row_pass(0) * pass_stride + chunk * kChunkElements;
    }

    // Moves the tile to load next by `elements` elements.
    FASTATTN_DEVICE void skip(int64_t elements) { gChunk += elements; }

    // Starts to copy a tile, and goes on to the next. kPartial: only the first num_rows rows exist; the others become
    // zero, and are not read. The tile is written byte_offset bytes after the buffer's beginning.
    template <bool kPartial>
    FASTATTN_DEVICE void load(int num_rows, uint32_t byte_offset = 0) {
        const int thread = ptx::opaque(threadIdx.x);  // so that values computed from it do not stay in registers
        const int rows_from_here = num_rows - thread / kChunksPerPass;
        const int chunks_from_here = head_dim / kChunkElements - thread % kChunksPerPass;
        Chunks::for_own_chunks([&](int first_row, int first_chunk, char* destination) {
            const bool exists = first_chunk < chunks_from_here && (!kPartial || first_row < rows_from_here);
            ptx::cp_async_cg_16(shared_address(destination) + byte_offset, gChunk + first_chunk * kChunkElements,
                                exists ? kChunkBytes : 0);
            if (first_chunk + kChunksPerPass == Layout::kChunksPerRow) gChunk += kDirection * pass_stride;
        });
    }
};

// Rounds a warp's accumulators to 16 bits, and writes them to the warp's own rows of a swizzled tile in shared memory.
template <DataType kDataType, int kTilesM, int kTilesD>
FASTATTN_DEVICE void stage_rows(uint16_t* sRows, const float (&rO)[kTilesM][kTilesD][4], int lane) {
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

// Rounds scores to 16 bits and writes them to a tile [*, kColumns]. `offset` is the accumulator_offset() of a warp's
// tiles. rS holds these tiles from tile first_tile on. An exclusive or adds a tile's index to the chunk of the first
// tile, so the two must share no bit.
template <DataType kDataType, int kColumns, int kTilesM, int kTilesN>
FASTATTN_DEVICE void stage_scores_at(uint16_t* sTile, uint32_t offset, const float (&rS)[kTilesM][kTilesN][4],
                                     int first_tile) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
        char* column = reinterpret_cast<char*>(sTile) + (offset ^ (first_tile + n) * kChunkBytes);
        for_own_rows<kTilesM>(/*lane=*/0, [&](int m, int half, int row) {
            *reinterpret_cast<uint32_t*>(column + row * Swizzle<kColumns>::kRowBytes) =
                pack<kDataType>(rS[m][n][2 * half], rS[m][n][2 * half + 1]);
        });
    }
}

// Returns the offset in bytes, in a tile [*, kColumns], of a lane's first accumulator in a warp's tiles that start at
// [first_row][first_column].
template <int kColumns>
FASTATTN_DEVICE uint32_t accumulator_offset(int first_row, int first_column, int lane) {
    return Swizzle<kColumns>::offset(first_row + accumulator_row(lane), first_column / kChunkElements) +
           lane % kLanesPerRow * static_cast<int>(sizeof(uint32_t));
}

// Does what stage_scores_at() does, for a warp's tiles that start at [first_row][first_column].
template <DataType kDataType, int kColumns, int kTilesM, int kTilesN>
FASTATTN_DEVICE void stage_scores(uint16_t* sTile, const float (&rS)[kTilesM][kTilesN][4], int first_row,
                                  int first_column, int first_tile, int lane) {
    // Opaque: one register holds the offset, from which the compiler then derives the addresses of all tiles.
    const uint32_t offset = ptx::opaque(accumulator_offset<kColumns>(first_row, first_column, lane));
    stage_scores_at<kDataType, kColumns>(sTile, offset, rS, first_tile);
}

// Copies a warp's rows [kRows, kHeadDim] from swizzled shared memory to global memory: the first num_rows rows, and the
// first head_dim elements of each row.
template <int kRows, int kHeadDim>
FASTATTN_DEVICE void store_rows(uint16_t* gRows, int64_t row_stride, int num_rows, const uint16_t* sRows, int lane,
                                int head_dim) {
    using Layout = Swizzle<kHeadDim>;
    constexpr int kRowsPerPass = kWarpSize / Layout::kPeriod;
#pragma unroll
    for (int first_row = 0; first_row < kRows; first_row += kRowsPerPass) {
#pragma unroll
        for (int first_chunk = 0; first_chunk < Layout::kChunksPerRow; first_chunk += Layout::kPeriod) {
            const int row = first_row + lane / Layout::kPeriod, chunk = first_chunk + lane % Layout::kPeriod;
            if (row < num_rows && chunk * kChunkElements < head_dim) {
                const char* source = reinterpret_cast<const char*>(sRows) + Layout::offset(row, chunk);
                *reinterpret_cast<uint4*>(gRows + row * row_stride + chunk * kChunkElements) =
                    *reinterpret_cast<const uint4*>(source);
            }
        }
    }
}

}  // namespace fastattn
