// Locates the tokens of a sequence in a cache. Copies tiles of tokens into swizzled shared memory, one warp for each
// tile.
//
// Lengths and block tables may contain any numbers. Lengths are clamped. Tokens whose page does not exist are absent:
// they are neither read nor written.
#pragma once

#include <cstdint>

#include "decode/key_bits.cuh"
#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/reduce.cuh"
#include "device/swizzle.cuh"
#include "device/token_location.cuh"
#include "host/decode_params.h"

namespace fastattn {

// Returns the block table's entry for a key, 0 <= key < capacity.
FASTATTN_DEVICE int32_t page_in_table(const CacheLayout& layout, int32_t batch, int32_t key) {
    const int32_t page_idx = layout.by_block_rows.quotient(key);
    const int64_t place = batch * layout.table_batch_stride + page_idx * layout.table_page_stride;
    return layout.block_table[place];  // no __ldg: see device/ptx/griddepcontrol.cuh
}

// Returns the location of a key, absent if the key's page does not exist. `page`: the key's entry of the block table,
// if there is a table.
FASTATTN_DEVICE TokenLocation location_of(const CacheLayout& layout, int32_t batch, int32_t key, int32_t page) {
    if (layout.block_table == nullptr) return {batch, key};
    return location_in_page(page, layout.num_blocks, key, layout.by_block_rows.quotient(key), layout.block_rows);
}

// The scale that all tokens of a head share, if the caller gives one.
struct HeadScale {
    bool is_per_head;
    float value;
};

template <CacheFormat kFormat>
struct CacheHead {
    const CacheView& cache;
    char* data;
    float* scales;

    FASTATTN_DEVICE CacheHead(const CacheView& cache, int32_t kv_head)
        : cache(cache),
          data(static_cast<char*>(cache.data) + kv_head * cache.head_bytes),
          scales(cache.scales + kv_head * cache.scale_head_stride) {}

    FASTATTN_DEVICE char* row(TokenLocation location) const {
        return data + (uint64_t{static_cast<uint32_t>(location.block)} * cache.block_chunks +
                       uint64_t{static_cast<uint32_t>(location.row)} * cache.row_chunks) *
                          kChunkBytes;
    }

    // Returns whether every scale is 1, so that no scales are stored.
    FASTATTN_DEVICE bool has_unit_scales() const { return kFormat == CacheFormat::kFp8 && cache.scales == nullptr; }

    FASTATTN_DEVICE HeadScale given_scale() const {
        if constexpr (kFormat != CacheFormat::kFp8) return {false, 1.0f};
        return {cache.scales_are_per_head, cache.scales_are_per_head && !has_unit_scales() ? *scales : 1.0f};
    }

    FASTATTN_DEVICE float* scale(TokenLocation location) const {
        return scales + uint64_t{static_cast<uint32_t>(location.block)} * cache.scale_block_stride +
               uint64_t{static_cast<uint32_t>(location.row)} * cache.scale_row_stride;
    }
};

// Starts to copy the scales of a tile's kKeys tokens. Lane l passes the address of token l's scale, or null if the
// token is absent; absent tokens get the scale 0. skipped: bit l says that token l's scale is not copied, because the
// caller writes it.
template <int kKeys>
FASTATTN_DEVICE void load_scales(float* sScales, const float* gScale, uint32_t skipped, int lane) {
    if (lane >= kKeys || (skipped >> lane & 1) != 0) return;
    ptx::cp_async_ca_4(shared_address(sScales + lane), gScale, gScale != nullptr ? sizeof(float) : 0);
}

inline constexpr int kAdjacentKeys = 16;  // most page sizes are multiples of it

// A tile [kRows, kHeadDim] of 16-bit elements that a warp copies. Neighbouring lanes copy neighbouring chunks of a row,
// and the same lanes copy all of kAdjacentKeys rows, so that each lane looks up one location only. kWholeChunks: rows
// in memory are a multiple of 16 bytes long.
template <int kHeadDim, int kRows, bool kWholeChunks = true>
struct WarpTile {
    using Layout = Swizzle<kHeadDim>;
    static constexpr int kNumRows = kRows;
    static constexpr int kLanesOfAdjacent = kWarpSize * kAdjacentKeys / kRows;
    static constexpr int kRowStep = kLanesOfAdjacent / Layout::kChunksPerRow;  // rows between a lane's chunks
    static constexpr int kPasses = kAdjacentKeys / kRowStep;
    static_assert(kRows % kAdjacentKeys == 0 && kRowStep >= 1 && kRowStep <= kSwizzleRows,
                  "whole rows, a period at most");

    char* sTile;
    int row, chunk;        // of this lane's first chunk
    uint32_t lane_offset;  // of that chunk in the tile, in bytes

    FASTATTN_DEVICE WarpTile(void* sTile, int lane)
        : sTile(static_cast<char*>(sTile)),
          row(lane / kLanesOfAdjacent * kAdjacentKeys + lane % kLanesOfAdjacent / Layout::kChunksPerRow),
          chunk(lane % Layout::kChunksPerRow),
          lane_offset(Layout::offset(row, chunk)) {}

    // Returns the offset of the lane's chunk in a pass. The swizzle of the pass's first row and the swizzle of the
    // lane's row in the pass can be applied one after the other, because the two row numbers share no bit and the
    // swizzle is an exclusive or.
    FASTATTN_DEVICE uint32_t chunk_offset(int pass) const {
        const int first_row = pass * kRowStep;
        const int chunk_xor = first_row * Layout::kPeriod / kSwizzleRows % Layout::kPeriod;
        return (lane_offset ^ (chunk_xor * kChunkBytes)) + first_row * Layout::kRowBytes;
    }

    // Starts to copy rows of row_bytes bytes, which all exist. This lane's kAdjacentKeys rows start at gFirst,
    // row_chunks chunks apart. Bytes beyond row_bytes become zero.
    FASTATTN_DEVICE void load_adjacent(const char* gFirst, uint32_t row_chunks, int row_bytes) const {
        const auto row_here = static_cast<uint32_t>(row % kAdjacentKeys);
        const char* gChunk = gFirst + (uint64_t{row_here} * row_chunks + chunk) * kChunkBytes;
        const uint32_t tile = shared_address(sTile);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            load_chunk(tile + chunk_offset(pass), gChunk, row_bytes, /*exists=*/true);
            gChunk += uint64_t{row_chunks} * (kRowStep * kChunkBytes);
        }
    }

    // Starts to copy rows of row_bytes bytes from anywhere in memory. Lane l passes the address of row l % kRows, or
    // null if the row is absent; absent rows become zero. skipped: bit r says that row r is not copied, because the
    // caller writes it. Rows of 512 bytes are copied two at a time, because ptxas spills registers otherwise. All
    // others are copied one at a time: this loop runs only where a sequence ends, has new tokens or has small pages,
    // and each launch fetches the kernel's code from memory.
    FASTATTN_DEVICE void load_rows(const char* gRow, int row_bytes, uint32_t skipped) const {
        const uint32_t tile = shared_address(sTile);
        constexpr int kUnrolled = kPasses > 8 ? 2 : 1;
#pragma unroll kUnrolled
        for (int pass = ptx::opaque(0); pass < kPasses; ++pass) {  // opaque: the compiler hoists nothing out of here
            const int tile_row = row + pass * kRowStep;
            const char* gTileRow = from_lane(gRow, tile_row);
            if ((skipped >> tile_row & 1) != 0) continue;
            const char* gChunk = gTileRow + chunk * kChunkBytes;
            load_chunk(tile + chunk_offset(pass), gChunk, row_bytes, /*exists=*/gTileRow != nullptr);
        }
    }

    // Starts to copy this lane's chunk of a row. A size that is 16 or 0 becomes a predicate in machine code; any other
    // size takes two more instructions.
    FASTATTN_DEVICE void load_chunk(uint32_t sChunk, const char* gChunk, int row_bytes, bool exists) const {
        const int bytes_from_here = row_bytes - chunk * kChunkBytes;
        const int size =
            kWholeChunks ? (bytes_from_here > 0 ? kChunkBytes : 0) : min(max(bytes_from_here, 0), kChunkBytes);
        ptx::cp_async_cg_16(sChunk, gChunk, exists ? size : 0);
    }

    // Calls function(uint32_t& pair_of_elements, its index in its chunk) for all elements that this lane has copied.
    // The loop is not unrolled, because it runs only where a tile has keys that some row does not see.
    template <typename Function>
    FASTATTN_DEVICE void for_own_pairs(Function&& function) const {
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) for_pairs_of_chunk(sTile + chunk_offset(pass), function);
    }
};

}  // namespace fastattn
