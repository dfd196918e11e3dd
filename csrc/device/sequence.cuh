// Finds the rows of a sequence in packed tensors, and the keys that a row sees.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/min_max.h"
#include "host/params.h"

namespace fastattn {

#ifndef __CUDACC__
using std::max;
using std::min;
#endif

struct Sequence {
    int32_t begin, length;
};

// Returns where sequence `batch` begins among `total` packed rows, and its length, at most `most`. Without cu_seqlens
// (a dense tensor), it begins at 0 and has `most` rows. Offsets are clamped, because they are in device memory, where
// the host does not check them.
FASTATTN_HOST_DEVICE Sequence sequence_of(const int32_t* cu_seqlens, int32_t batch, int32_t total, int32_t most) {
    if (cu_seqlens == nullptr) return {0, most};
    const int32_t begin = min(max(cu_seqlens[batch], 0), total);
    const int32_t end = min(max(cu_seqlens[batch + 1], begin), total);
    return {begin, min(end - begin, most)};
}

// Keys [begin, end).
struct KeyRange {
    int32_t begin, end;

    FASTATTN_HOST_DEVICE bool has(int32_t key) const { return key >= begin && key < end; }
};

// Rows [begin, end).
struct RowRange {
    int32_t begin, end;
};

// The keys that rows see: row i is at the position of key i + offset. It sees this key, the `left` keys before it and
// the `right` keys after it.
//
// 32 bits suffice. A call has at most 2^31 - 1 rows, and as many keys, so that the distance between a row and a key
// fits. The sum of such a distance and `left` or `right` may not fit, so the distance is bounded before the addition.
struct Window {
    int32_t num_keys, offset, left, right;

    FASTATTN_HOST_DEVICE KeyRange keys_of(int32_t row) const {
        const int32_t position = sum(row, offset);
        return {from(position, left), until(position, right, num_keys)};
    }

    // Returns which of num_rows rows see a key.
    FASTATTN_HOST_DEVICE RowRange rows_of(int32_t key, int32_t num_rows) const {
        const int32_t position = sum(key, -offset);
        return {min(from(position, right), num_rows), until(position, left, num_rows)};
    }

  private:
    // Wraps around only for rows and keys past the last ones, which do not exist.
    FASTATTN_HOST_DEVICE static int32_t sum(int32_t a, int32_t b) {
        return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
    }
    // Returns max(position - side, 0).
    FASTATTN_HOST_DEVICE static int32_t from(int32_t position, int32_t side) { return max(position, side) - side; }
    // Returns position + 1 + side, bounded by 0 and count.
    FASTATTN_HOST_DEVICE static int32_t until(int32_t position, int32_t side, int32_t count) {
        return max(min(position, count - 1 - side) + 1 + side, 0);
    }
};

FASTATTN_HOST_DEVICE Window window_of(const ScoreParams& params, int32_t num_rows, int32_t num_keys) {
    const bool is_given = params.query_offset != ScoreParams::kLastRowAtLastKey;
    return {num_keys, is_given ? params.query_offset : num_keys - num_rows, params.window_left, params.window_right};
}

}  // namespace fastattn
