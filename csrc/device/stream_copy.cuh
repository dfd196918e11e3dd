// Copies successive tiles of a matrix into the stages of a pipeline, by all threads of a CTA.
#pragma once

#include <cstdint>

#include "device/ptx/cp_async.cuh"
#include "host/host_device.h"

namespace fastattn {

// Tiles have kRows rows of Layout::kRowBytes bytes. Each thread copies one 16-byte chunk of every kRowsPerPass-th row,
// and neighbouring threads copy neighbouring chunks. Layout::offset(row, chunk) returns where a chunk goes, in bytes
// from the start of the stage. The pattern of offset() must repeat after Layout::kPeriodRows rows.
template <typename Layout, int kRows, int kThreads>
struct TileStream {
    static constexpr int kBytes = 16;
    static constexpr int kChunksPerRow = Layout::kRowBytes / kBytes;
    static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
    static constexpr int kPasses = kRows / kRowsPerPass;
    static_assert(kRowsPerPass % Layout::kPeriodRows == 0, "a thread's chunks must share one swizzled column");
    static_assert(kRows % kRowsPerPass == 0, "passes must cover the tile exactly");

    int row, column;     // of this thread's first chunk in the tile; the column in bytes
    uint32_t offset;     // where this chunk goes in a stage
    const char* global;  // where this chunk is in the tile to load next
    int64_t row_bytes;   // from one row to the next

    FASTATTN_DEVICE TileStream(const void* first_tile, int64_t row_bytes, int thread)
        : row(thread / kChunksPerRow), column(thread % kChunksPerRow * kBytes), row_bytes(row_bytes) {
        offset = Layout::offset(row, thread % kChunksPerRow);
        global = static_cast<const char*>(first_tile) + row * row_bytes + column;
    }

    // Starts to copy a tile. Only its first num_rows rows, and their first num_bytes bytes, exist. The rest becomes
    // zero, and is not read. The next tile begins `advance` bytes after this tile.
    FASTATTN_DEVICE void load(uint32_t stage, int num_rows, int num_bytes, int64_t advance) {
        load_at_distance(stage, num_rows, num_bytes, 0);
        global += advance;
    }

    // Does the same for the tile `distance` bytes after the next tile. The next tile stays the same.
    FASTATTN_DEVICE void load_at_distance(uint32_t stage, int num_rows, int num_bytes, int64_t distance) const {
        const int rows_here = column < num_bytes ? num_rows : 0, bytes_here = min(num_bytes - column, kBytes);
        const char* source = global + distance;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const bool exists = row + pass * kRowsPerPass < rows_here;
            ptx::cp_async_cg_16(stage + offset + pass * kRowsPerPass * Layout::kRowBytes, source,
                                exists ? bytes_here : 0);
            source += kRowsPerPass * row_bytes;
        }
    }
};

}  // namespace fastattn
