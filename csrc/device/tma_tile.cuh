// Tiles in shared memory as TMA leaves them and wgmma reads them: blocks of 64 or 32 columns of 16-bit elements, one
// after the other, each [kRows][kBlockColumns], swizzled. Chunk c of row r is stored as chunk c ^ (r % 8) in rows of
// 128 bytes, and as chunk c ^ (r / 2 % 4) in rows of 64 bytes. A block begins where the pattern begins, at a multiple
// of 1024 or 512 bytes.
#pragma once

#include <cstdint>

#include "device/ptx/bulk_tensor.cuh"
#include "device/swizzle.cuh"
#include "host/tensor_map.h"

namespace fastattn {

// Returns how many columns a tile's blocks have: 64, or 32 if 64 does not divide `columns`. The tile's columns must
// fill its blocks. A product whose N is these columns reads whole swizzle atoms, which are as wide as a block
// (PTX ISA, "Shared Memory Matrix Layout"), and would also compute the padding.
constexpr int widest_block_columns(int columns) {
    return columns % 64 == 0 ? 64 : 32;
}

template <int kRows, int kColumns, int kBlockColumns_ = widest_block_columns(kColumns)>
struct TmaTile {
    static constexpr int kNumRows = kRows;
    static constexpr int kBlockColumns = kBlockColumns_;
    static constexpr int kRowBytes = kBlockColumns * 2;
    static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
    static constexpr int kNumBlocks = ceil_div(kColumns, kBlockColumns);
    static constexpr int kBlockBytes = kRows * kRowBytes;
    static constexpr int kBytes = kNumBlocks * kBlockBytes;
    static constexpr int kElements = kBytes / 2;
    static_assert(kRows % 8 == 0, "blocks begin where the swizzle's pattern does");

    // Returns the offset of a 16-byte chunk, in bytes from the start of the tile.
    FASTATTN_DEVICE static uint32_t offset(int row, int chunk) {
        return chunk / kChunksPerRow * kBlockBytes + row * kRowBytes +
               (chunk % kChunksPerRow ^ row / (8 / kChunksPerRow) % kChunksPerRow) * kChunkBytes;
    }

    // Called by one thread. Starts to copy a box to rows_of_tile: the rows of a group of heads, from `row` on. A box
    // may have fewer rows than the tile. Elements outside of the tensor become zero; the barrier counts their bytes
    // too.
    FASTATTN_DEVICE static void load(uint32_t rows_of_tile, const TensorMap& map, int32_t batch, int32_t group,
                                     int32_t row, uint32_t barrier) {
#pragma unroll
        for (int block = 0; block < kNumBlocks; ++block) {
            ptx::cp_async_bulk_tensor_5d(rows_of_tile + block * kBlockBytes, &map.encoded, block * kBlockColumns, 0,
                                         row, map.has_groups ? group : 0, map.has_batch ? batch : 0, barrier);
        }
    }

    // Does the same into two CTAs of a cluster, to the same rows of both CTAs' tiles. Each CTA calls it for half of the
    // rows.
    FASTATTN_DEVICE static void load_into_both(uint32_t rows_of_tile, const TensorMap& map, int32_t batch,
                                               int32_t group, int32_t row, uint32_t barrier) {
        static_assert(kRows % 16 == 0, "a half begins where the swizzle's pattern does");
#pragma unroll
        for (int block = 0; block < kNumBlocks; ++block) {
            ptx::cp_async_bulk_tensor_5d_multicast(rows_of_tile + block * kBlockBytes, &map.encoded,
                                                   block * kBlockColumns, 0, row, map.has_groups ? group : 0,
                                                   map.has_batch ? batch : 0, barrier, /*ctas=*/0b11);
        }
    }

    // Writes zeros to all rows from first_row on. `threads` threads call this and divide the rows.
    FASTATTN_DEVICE static void zero_rows(uint16_t* sTile, int first_row, int thread, int threads) {
        const int chunks_per_block = (kRows - first_row) * (kRowBytes / kChunkBytes);
        for (int block = 0; block < kNumBlocks; ++block) {
            uint4* chunks =
                reinterpret_cast<uint4*>(reinterpret_cast<char*>(sTile) + block * kBlockBytes + first_row * kRowBytes);
            for (int i = thread; i < chunks_per_block; i += threads) chunks[i] = uint4{0, 0, 0, 0};
        }
    }

    // Calls function(uint32_t& pair_of_elements) for this thread's part of the tile, which `threads` threads divide.
    template <typename Function>
    FASTATTN_DEVICE static void for_pairs_of(uint16_t* sTile, int thread, int threads, Function&& function) {
        for (int i = thread; i < kBytes / kChunkBytes; i += threads) {
            uint4& bits = reinterpret_cast<uint4*>(sTile)[i];
            uint4 pairs = bits;
            function(pairs.x);
            function(pairs.y);
            function(pairs.z);
            function(pairs.w);
            bits = pairs;
        }
    }
};

}  // namespace fastattn
