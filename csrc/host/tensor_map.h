// Tensor maps: how TMA finds boxes of a tensor. CUDA Driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/params.h"

namespace fastattn {

// Maps a HeadsView as [batch, heads / group, rows, group, head_dim], in boxes of 64 or 32 columns, all heads of a
// group, and some rows: the rows of heads that follow each other lie side by side in a box, each swizzled in its 128 or
// 64 bytes.
struct TensorMap {
    CUtensorMap encoded;  // aligned to 64 bytes
    // False where all groups of heads, or all of the batch, share memory: then the coordinate is always 0.
    bool has_groups, has_batch;
};

// A tensor map of a matrix [rows, columns] with contiguous rows, in boxes of box_columns by box_rows. A row of a box is
// 128 bytes, or 64, and swizzled in that length.
struct MatrixMap {
    CUtensorMap encoded;  // aligned to 64 bytes
};

// element_bytes: 1 or 2. The base and row_bytes, from one row to the next, are multiples of 16; rows do not overlap.
MatrixMap matrix_map(const void* data, int32_t element_bytes, int32_t rows, int32_t columns, int64_t row_bytes,
                     int32_t box_rows, int32_t box_columns);

// `rows` counts those of all packed sequences. Rows do not overlap, and the heads of a group are not the same memory:
// no document says that the driver takes a stride of 0.
TensorMap tensor_map(const HeadsView<const uint16_t>& view, int32_t rows, int32_t group, int32_t box_rows,
                     int32_t box_columns, DataType dtype);

}  // namespace fastattn
