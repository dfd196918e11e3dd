// Tiles in shared memory as TMA leaves them and wgmma reads them: blocks of 64 or 32 columns of 16-bit elements, one
// after the other, each [kRows][kBlockColumns], swizzled. Chunk c of row r lies at c ^ (r % 8) in rows of 128 bytes,
// and at c ^ (r / 2 % 4) in rows of 64. A block begins where the pattern does, at a multiple of 1024 or 512 bytes.
#pragma once

#include <cstdint>

#include "device/ptx/bulk_tensor.cuh"
#include "device/swizzle.cuh"
#include "host/tensor_map.h"

namespace fastattn {

// Returns the columns of a tile's blocks: 64, or 32 where 64 does not divide `columns`. Columns must fill the blocks: a
// product whose N is the columns reads whole swizzle atoms (PTX ISA, "Shared Memory Matrix Layout"), each as wide as a
// block, and would also compute the padding.
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

    // Called by one thread. Starts to copy a box, the rows of a group of heads from `row` on, to rows_of_tile. A box
    // may have fewer rows than the tile. Elements outside of the tensor become zero; the barrier counts them too.
    FASTATTN_DEVICE static void load(uint32_t rows_of_tile, const TensorMap& map, int32_t batch, int32_t group,
                                     int32_t row, uint32_t barrier) {
#pragma unroll
        for (int block = 0; block < kNumBlocks; ++block) {
            ptx::cp_async_bulk_tensor_5d(rows_of_tile + block * kBlockBytes, &map.encoded, block * kBlockColumns, 0,
                                         row, map.has_groups ? group : 0, map.has_batch ? batch : 0, barrier);
        }
    }

    // Does the same into two CTAs of a cluster, to the same rows of both tiles. Each CTA copies half of the rows.
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

    // Writes zeros from first_row to the end of the tile. Each of `threads` threads writes some.
    FASTATTN_DEVICE static void zero_rows(uint16_t* sTile, int first_row, int thread, int threads) {
        const int chunks_per_block = (kRows - first_row) * (kRowBytes / kChunkBytes);
        for (int block = 0; block < kNumBlocks; ++block) {
            uint4* chunks =
                reinterpret_cast<uint4*>(reinterpret_cast<char*>(sTile) + block * kBlockBytes + first_row * kRowBytes);
            for (int i = thread; i < chunks_per_block; i += threads) chunks[i] = uint4{0, 0, 0, 0};
        }
    }

    // Calls function(uint32_t& pair_of_elements) for this thread's pairs of the tile, which `threads` threads divide.
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
