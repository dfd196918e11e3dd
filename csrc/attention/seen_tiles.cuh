// Tells the backward kernels which row tiles see a key tile through ranges of keys. Reads the bits that
// backward_ranges_sm80.cuh has written. All lanes of a warp call find() and visited() together.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "host/params.h"

namespace fastattn {

// The row tiles of a sequence that see one of its key tiles.
struct RowTilesOfKeys {
    const uint2* words;  // words of the first row tile of head 0
    int64_t head_stride;
    int32_t pitch, key_tile;

    // first_row: the sequence's first row in the packed tensor.
    FASTATTN_DEVICE static RowTilesOfKeys of(const SeenTiles& tiles, int32_t batch, int32_t first_row,
                                             int32_t key_tile) {
        return {reinterpret_cast<const uint2*>(tiles.of(batch, 0, 0, first_row)), tiles.head_stride / 2,
                tiles.pitch / 2, key_tile};
    }

    // Moves `head` and `row_tile` to the first row tile, from the given one on, that sees some key of the key tile.
    // Searches row tiles [begin_tile, end_tile) of each head. Sets `head` to end_head if there is none. Returns whether
    // every row of the row tile that it found sees every key.
    FASTATTN_DEVICE bool find(int32_t& head, int32_t& row_tile, int32_t begin_tile, int32_t end_tile,
                              int32_t end_head) const {
        const uint32_t bit = 1u << key_tile % kWarpSize;
#pragma unroll 1
        while (head < end_head) {
            const uint2 word = word_of(head, row_tile, end_tile);
            const uint32_t seen = __ballot_sync(0xffffffff, (word.x & bit) != 0);
            const uint32_t full = __ballot_sync(0xffffffff, (word.y & bit) != 0);
            if (seen != 0) {
                const int idx = __ffs(seen) - 1;
                row_tile += idx;
                return (full >> idx & 1) != 0;
            }
            row_tile += kWarpSize;
            if (row_tile >= end_tile) row_tile = begin_tile, ++head;
        }
        return false;
    }

    // How many row tiles find() visits in all heads together, and a range [begin, end) that contains all of them.
    struct Visited {
        int32_t count, begin, end;
    };

    // Finds what find() visits among the first end_tile row tiles of heads [begin_head, end_head). If heads share their
    // ranges (head_stride is 0), they have the same words, and only those of one head are read.
    FASTATTN_DEVICE Visited visited(int32_t begin_head, int32_t end_head, int32_t end_tile) const {
        const uint32_t bit = 1u << key_tile % kWarpSize;
        Visited visited{0, end_tile, 0};
        const int32_t heads_of_words = head_stride == 0 ? end_head - begin_head : 1;
#pragma unroll 1
        for (int32_t head = begin_head; head < end_head; head += heads_of_words) {
#pragma unroll 2
            for (int32_t first = 0; first < end_tile; first += kWarpSize) {
                const uint32_t seen = __ballot_sync(0xffffffff, (word_of(head, first, end_tile).x & bit) != 0);
                if (seen == 0) continue;
                visited.count += __popc(seen) * heads_of_words;
                visited.begin = min(visited.begin, first + __ffs(seen) - 1);
                visited.end = max(visited.end, first + kWarpSize - __clz(seen));
            }
        }
        return visited;
    }

    // Counts the key tiles before key_tile that a row tile sees. Their CTAs add to the row tile's dQ before the CTA of
    // key_tile.
    FASTATTN_DEVICE int32_t num_before(int32_t head, int32_t row_tile) const {
        const uint2* line = words_of(head, row_tile);
        int32_t count = 0;
#pragma unroll 1  // unrolled, the loads would take more registers
        for (int32_t first = 0; first < key_tile; first += kWarpSize) {
            count += __popc(line[first / kWarpSize].x << (kWarpSize - min(key_tile - first, kWarpSize)));
        }
        return count;
    }

  private:
    // Returns both words of row tile `first` + lane, or zeros if that is not before `end`.
    FASTATTN_DEVICE uint2 word_of(int32_t head, int32_t first, int32_t end) const {
        const int32_t own = first + threadIdx.x % kWarpSize;
        return own < end ? words_of(head, own)[key_tile / kWarpSize] : uint2{0, 0};
    }

    FASTATTN_DEVICE const uint2* words_of(int32_t head, int32_t row_tile) const {
        return words + head * head_stride + int64_t{row_tile} * pitch;
    }
};

// Returns whether, in a square of `block` rows by `block` keys, some row may see some key through its ranges. May also
// return true if no row does, because it tests all tiles that overlap the square as a whole. rows: the rows of the
// sequence in the packed tensor.
FASTATTN_DEVICE bool may_see(const SeenTiles& tiles, int32_t batch, int32_t head, const Sequence& rows,
                             int32_t num_keys, int32_t first_row, int32_t first_key, int32_t block) {
    const int32_t last_row = min(first_row + block, rows.length) - 1, last_key = min(first_key + block, num_keys) - 1;
    for (int32_t row_tile = first_row / tiles.block_m; row_tile <= last_row / tiles.block_m; ++row_tile) {
        const auto* words = reinterpret_cast<const uint2*>(tiles.of(batch, head, row_tile, rows.begin));
        for (int32_t key_tile = first_key / tiles.block_n; key_tile <= last_key / tiles.block_n; ++key_tile) {
            if ((words[key_tile / kWarpSize].x >> key_tile % kWarpSize & 1) != 0) return true;
        }
    }
    return false;
}

}  // namespace fastattn
