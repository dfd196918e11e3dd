// Lays out tiles of 16-bit rows in shared memory. The 16-byte chunks of a row are permuted so that neither ldmatrix nor
// 16-byte copies meet a bank conflict. If a row is a multiple of 128 bytes, chunk c of row r is stored as chunk c ^ (r
// % 8). Chunk c of eight adjacent rows, which ldmatrix reads, then covers all 32 banks once. Eight neighbouring chunks
// of one row, which copies access, also cover all banks once. Rows of an odd multiple of 64 bytes start at banks 0 and
// 16 in turn. In these rows, chunk c is stored as chunk c ^ (r / 2 % 4), which also avoids bank conflicts.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace fastattn {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;
inline constexpr int kSwizzleRows = 8;  // the pattern repeats after so many rows

FASTATTN_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Calls function(uint32_t& pair_of_elements, index of the pair) for the four pairs of 16-bit elements of a chunk in
// shared memory, in registers: one load and one store.
template <typename Function>
FASTATTN_DEVICE void for_pairs_of_chunk(char* sChunk, Function&& function) {
    uint4& bits = *reinterpret_cast<uint4*>(sChunk);
    uint4 pairs = bits;
    function(pairs.x, 0);
    function(pairs.y, 1);
    function(pairs.z, 2);
    function(pairs.w, 3);
    bits = pairs;
}

template <int kHeadDim>
struct Swizzle {
    static constexpr int kRowElements = kHeadDim;
    static constexpr int kRowBytes = kRowElements * 2;
    static constexpr int kChunksPerRow = kRowElements / kChunkElements;
    static constexpr int kPeriod = kChunksPerRow % 8 == 0 ? 8 : 4;  // adjacent chunks that are permuted together
    static constexpr int kPeriodRows = kSwizzleRows;
    static_assert(kChunksPerRow % kPeriod == 0, "a row must hold whole periods of the pattern");

    // Returns the offset of a chunk, in bytes from the start of the tile.
    FASTATTN_DEVICE static uint32_t offset(int row, int chunk) {
        return row * kRowBytes + (chunk ^ (row * kPeriod / kSwizzleRows % kPeriod)) * kChunkBytes;
    }
};

// Computes the addresses that a lane passes to ldmatrix, for the 16x16 blocks of such a tile. Because the pattern is an
// exclusive or, moving by chunks inside a period is an exclusive or too, on lane_offset, which several tiles may share.
// All other distances are compile-time constants. A lane that starts further right (at_column()) can only move by
// columns that share no bit with the column at which it starts.
template <int kHeadDim>
struct SwizzledBlocks {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kPeriodBytes = Layout::kPeriod * kChunkBytes;

    uint32_t tile;         // shared memory, a multiple of kPeriodBytes
    uint32_t lane_offset;  // in bytes, of the lane's row and chunk in the first block

    FASTATTN_DEVICE SwizzledBlocks(const uint16_t* tile, LdmatrixLane lane)
        : tile(shared_address(tile)), lane_offset(Layout::offset(lane.row, lane.chunk)) {}

    // Returns the same blocks `row` rows further down, a multiple of 8.
    FASTATTN_DEVICE SwizzledBlocks at_row(int row) const {
        SwizzledBlocks blocks = *this;
        blocks.tile += row * Layout::kRowBytes;
        return blocks;
    }

    // Does the same for a distance that is known only at run time. The distance is added to lane_offset, because
    // address() adds compile-time constants to `tile`.
    FASTATTN_DEVICE SwizzledBlocks below(int num_rows) const {
        SwizzledBlocks blocks = *this;
        blocks.lane_offset += num_rows * Layout::kRowBytes;
        return blocks;
    }

    // Returns the lane's address in the block whose upper left element is [row][column], both multiples of 16.
    FASTATTN_DEVICE uint32_t address(int row, int column) const {
        const int chunk = column / kChunkElements;
        const uint32_t in_period = lane_offset ^ (chunk % Layout::kPeriod * kChunkBytes);
        return in_period + (tile + row * Layout::kRowBytes + chunk / Layout::kPeriod * kPeriodBytes);
    }
};

}  // namespace fastattn
