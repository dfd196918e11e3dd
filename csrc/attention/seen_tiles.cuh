// Tells the backward kernels which tiles of rows see a tile of keys through ranges of keys, from what
// backward_ranges_sm80.cuh has written.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "host/params.h"

namespace fastattn {

// The tiles of rows of a sequence beside one tile of keys.
struct RowTilesOfKeys {
    const uint2* words;  // of the first tile of rows of the first head
    int64_t head_stride;
    int32_t pitch, key_tile;

    // first_row: of the sequence, in the packed tensor.
    FASTATTN_DEVICE static RowTilesOfKeys of(const SeenTiles& tiles, int32_t batch, int32_t first_row,
                                             int32_t key_tile) {
        return {reinterpret_cast<const uint2*>(tiles.of(batch, 0, 0, first_row)), tiles.head_stride / 2,
                tiles.pitch / 2, key_tile};
    }

    // Bits of 32 tiles of rows.
    struct Bits {
        uint32_t seen, full;  // some row sees some key; every row sees all
    };

    // Looks at the tiles from `first` to before `end`. Called by all lanes of a warp.
    FASTATTN_DEVICE Bits look_at(int32_t head, int32_t first, int32_t end) const {
        const int32_t own = first + threadIdx.x % kWarpSize;
        const uint2 words = own < end ? words_of(head, own)[key_tile / kWarpSize] : uint2{0, 0};
        const uint32_t bit = 1u << key_tile % kWarpSize;
        return {__ballot_sync(0xffffffff, (words.x & bit) != 0), __ballot_sync(0xffffffff, (words.y & bit) != 0)};
    }

    // How many tiles of keys before this one a tile of rows sees: those that add to its dQ first.
    FASTATTN_DEVICE int32_t num_before(int32_t head, int32_t row_tile) const {
        const uint2* words = words_of(head, row_tile);
        int32_t count = 0;
#pragma unroll 1
        for (int32_t first = 0; first < key_tile; first += kWarpSize) {
            const int32_t num_bits = min(key_tile - first, kWarpSize);
            count += __popc(words[first / kWarpSize].x << (kWarpSize - num_bits));
        }
        return count;
    }

  private:
    FASTATTN_DEVICE const uint2* words_of(int32_t head, int32_t row_tile) const {
        return words + head * head_stride + int64_t{row_tile} * pitch;
    }
};

}  // namespace fastattn
