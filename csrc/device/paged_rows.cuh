// Finds the rows of a tile of paged keys or values, and copies the tile into swizzled shared memory.
//
// A key whose page does not exist is absent: it is not read, its row in shared memory becomes zero, and no query row
// sees it.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"
#include "device/token_location.cuh"
#include "host/params.h"

namespace fastattn {

// Returns how many keys sequence `batch` has, clamped to 0 … most, whatever the offsets say.
FASTATTN_DEVICE int32_t paged_keys(const int32_t* cu_seqlens, int32_t batch, int32_t most) {
    const int64_t length = int64_t{cu_seqlens[batch + 1]} - cu_seqlens[batch];
    return static_cast<int32_t>(min(max(length, int64_t{0}), int64_t{most}));
}

// The pages of one sequence.
struct PageTable {
    const PagedParams& params;
    const int32_t* pages;
    int32_t num_pages, num_keys;  // num_pages: pages of the whole cache

    FASTATTN_DEVICE PageTable(const PagedParams& params, int32_t batch, int32_t num_pages, int32_t num_keys)
        : params(params),
          pages(params.block_table + int64_t{batch} * params.max_pages),
          num_pages(num_pages),
          num_keys(num_keys) {}

    // Returns whether this thread finds a page of keys [begin, end) that does not exist. It checks every threads-th
    // page.
    FASTATTN_DEVICE bool lacks_some(int32_t begin, int32_t end, int thread, int threads) const {
        const int32_t last_key = min(end, num_keys) - 1;
        if (last_key < begin) return false;
        bool lacks = false;
        const int32_t last_page = params.by_page_size.quotient(last_key);
        for (int32_t i = params.by_page_size.quotient(begin) + thread; i <= last_page; i += threads) {
            lacks |= static_cast<uint32_t>(__ldg(pages + i)) >= static_cast<uint32_t>(num_pages);
        }
        return lacks;
    }

    // Returns the location of a key. Keys from num_keys on are absent, and the table is not read for them.
    FASTATTN_DEVICE TokenLocation find(int32_t key) const {
        const int32_t page_idx = params.by_page_size.quotient(key);
        const int32_t page = key < num_keys ? __ldg(pages + page_idx) : -1;
        return location_in_page(page, num_pages, key, page_idx, params.page_size);
    }
};

// Returns which of this lane's keys are present, in a tile that begins at first_key. Bit 2n + e is key first_key +
// accumulator_column(lane) + 8n + e, as in the lane's accumulators. Called by a whole warp.
template <int kTilesN>
FASTATTN_DEVICE uint32_t present_columns(const PageTable& table, int32_t first_key, int lane) {
    constexpr int kTilesPerWord = kWarpSize / kMmaN;
    uint32_t present = 0;
#pragma unroll
    for (int n = 0; n < kTilesN; n += kTilesPerWord) {
        const bool is_present = table.find(first_key + n * kMmaN + lane).is_present();
        const uint32_t own = __ballot_sync(0xffffffff, is_present) >> accumulator_column(lane) & 0x03030303;
        // Moves the two lowest bits of each byte next to each other.
        present |= ((own | own >> 6 | own >> 12 | own >> 18) & 0xff) << 2 * n;
    }
    return present;
}

// Copies tiles of one head's keys or values. Every tile goes to the same buffer.
template <int kRows, int kHeadDim, int kThreads>
struct PagedTileLoader : TileChunks<kRows, kHeadDim, kThreads, /*kDirection=*/1> {
    using Chunks = TileChunks<kRows, kHeadDim, kThreads, /*kDirection=*/1>;
    using Chunks::kChunksPerPass, Chunks::kRowsPerPass, Chunks::kRowPasses, Chunks::head_dim;

    // The locations of the rows of a tile that this thread copies. They are the same for keys and values. Threads look
    // them up one step before they copy the rows, so that no copy waits for the block table.
    struct Rows {
        TokenLocation rows[kRowPasses];

        FASTATTN_DEVICE void find(const PageTable& table, int32_t first_key, int thread) {
#pragma unroll
            for (int i = 0; i < kRowPasses; ++i) {
                rows[i] = table.find(first_key + thread / kChunksPerPass + i * kRowsPerPass);
            }
        }

        // Returns whether one of these keys is absent although it is below table.num_keys.
        FASTATTN_DEVICE bool has_hole(const PageTable& table, int32_t first_key, int thread) const {
            bool found = false;
#pragma unroll
            for (int i = 0; i < kRowPasses; ++i) {
                const int32_t key = first_key + thread / kChunksPerPass + i * kRowsPerPass;
                found |= !rows[i].is_present() && key < table.num_keys;
            }
            return found;
        }
    };

    const PageStrides& strides;
    const uint16_t* gHead;  // row 0 of page 0

    FASTATTN_DEVICE PagedTileLoader(uint16_t* sTile, const HeadsView<const uint16_t>& pages, const PageStrides& strides,
                                    int32_t head, int thread)
        : Chunks(sTile, thread, pages.head_dim), strides(strides), gHead(row_pointer(pages, 0, head, 0)) {}

    FASTATTN_DEVICE void load(const Rows& own) const {
        const int chunk = ptx::opaque(threadIdx.x) % kChunksPerPass;  // opaque: need not stay in a register
        const int chunks_from_here = head_dim / kChunkElements - chunk;
        const uint16_t* gRows[kRowPasses];
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const uint64_t chunks = uint64_t{static_cast<uint32_t>(own.rows[i].block)} * strides.page +
                                    uint64_t{static_cast<uint32_t>(own.rows[i].row)} * strides.row;
            gRows[i] = gHead + (chunks + chunk) * kChunkElements;
        }
        Chunks::for_own_chunks([&](int first_row, int first_chunk, char* destination) {
            const int i = first_row / kRowsPerPass;
            const bool exists = first_chunk < chunks_from_here && own.rows[i].is_present();
            ptx::cp_async_cg_16(shared_address(destination), gRows[i] + first_chunk * kChunkElements,
                                exists ? kChunkBytes : 0);
        });
    }
};

}  // namespace fastattn
