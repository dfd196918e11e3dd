// Tiles of 16-bit rows in shared memory, with their 16-byte chunks permuted so that neither ldmatrix nor 16-byte copies
// meet a bank conflict: chunk c of row r stands where chunk c ^ (r % 8) would. Eight rows at one c, as ldmatrix reads
// them, and eight neighbouring chunks of one row, as copies touch them, then cover all 32 banks once.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace fastattn {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;
inline constexpr int kSwizzleRows = 8;  // the pattern repeats after so many rows, and after so many chunks

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Rows of so many elements: kHeadDim where that is a power of two of at least 64, else the next one.
constexpr int row_elements(int head_dim) {
    int elements = kSwizzleRows * kChunkElements;
    while (elements < head_dim) elements *= 2;
    return elements;
}

template <int kHeadDim>
struct Swizzle {
    static constexpr int kRowElements = row_elements(kHeadDim);
    static constexpr int kRowBytes = kRowElements * 2;
    static constexpr int kChunksPerRow = kRowElements / kChunkElements;
    static_assert(kChunksPerRow % kSwizzleRows == 0, "a row must hold whole periods of the pattern");

    // Offset in bytes of a chunk from the start of the tile.
    __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
        return row * kRowBytes + (chunk ^ (row % kSwizzleRows)) * kChunkBytes;
    }
};

// The addresses that a lane passes to ldmatrix, for the 16x16 blocks of such a tile. As the pattern is an exclusive or,
// moving by chunks inside a period is one too, on an offset that tiles may share; all else is a compile-time constant.
// A lane that starts further right (at_column) may only move by columns that share no bit with its own.
template <int kHeadDim>
struct SwizzledBlocks {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kPeriodBytes = kSwizzleRows * kChunkBytes;

    uint32_t tile;         // shared memory, a multiple of kPeriodBytes
    uint32_t lane_offset;  // in bytes, of the lane's row and chunk in the first block

    __device__ __forceinline__ SwizzledBlocks(const uint16_t* tile, LdmatrixLane lane)
        : tile(shared_address(tile)), lane_offset(Layout::offset(lane.row, lane.chunk)) {}

    // The same in the tile that starts so many rows further down, a multiple of 8.
    __device__ __forceinline__ SwizzledBlocks at_row(int row) const {
        SwizzledBlocks blocks = *this;
        blocks.tile += row * Layout::kRowBytes;
        return blocks;
    }

    // The lane's address in the block whose upper left element is [row][column], both multiples of 16.
    __device__ __forceinline__ uint32_t address(int row, int column) const {
        const int chunk = column / kChunkElements;
        const uint32_t in_period = lane_offset ^ (chunk % kSwizzleRows * kChunkBytes);
        return in_period + (tile + row * Layout::kRowBytes + chunk / kSwizzleRows * kPeriodBytes);
    }
};

}  // namespace fastattn
