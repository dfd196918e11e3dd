// Which rows of packed tensors belong to a sequence, and which keys a row of it sees.
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

// Sequence `batch` of a dense tensor is whole. Offsets on the device may be anything: they are clamped to the tensor.
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

// Row i stands at key i + offset, and sees `left` keys before and `right` keys after that; negative: all.
struct Window {
    int32_t num_keys, offset, left, right;

    FASTATTN_HOST_DEVICE KeyRange keys_of(int32_t row) const {
        const int64_t position = int64_t{row} + offset;
        const int64_t first = left < 0 ? 0 : position - left;
        const int64_t end = right < 0 ? num_keys : position + right + 1;
        return {static_cast<int32_t>(max(first, int64_t{0})),
                static_cast<int32_t>(max(min(end, int64_t{num_keys}), int64_t{0}))};
    }

    // Which of num_rows rows see a key.
    FASTATTN_HOST_DEVICE RowRange rows_of(int32_t key, int32_t num_rows) const {
        const int64_t at_key = int64_t{key} - offset;
        const int64_t first = right < 0 ? 0 : at_key - right;
        const int64_t end = left < 0 ? num_rows : at_key + left + 1;
        return {static_cast<int32_t>(min(max(first, int64_t{0}), int64_t{num_rows})),
                static_cast<int32_t>(max(min(end, int64_t{num_rows}), int64_t{0}))};
    }
};

FASTATTN_HOST_DEVICE Window window_of(const ScoreParams& params, int32_t num_rows, int32_t num_keys) {
    const bool is_given = params.query_offset != ScoreParams::kLastRowAtLastKey;
    return {num_keys, is_given ? params.query_offset : num_keys - num_rows, params.window_left, params.window_right};
}

}  // namespace fastattn
