// Tensor maps: how TMA finds boxes of a tensor. CUDA Driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/params.h"

namespace fastattn {

// Maps a HeadsView as [batch, heads / group, rows, group, head_dim]. A box has 64 or 32 columns of some rows of all
// heads of a group. In a box, the lines of a row's heads are adjacent. Each line has 128 or 64 bytes, and is swizzled.
struct TensorMap {
    CUtensorMap encoded;  // aligned to 64 bytes
    // has_groups is false if there is only one group, or if all groups share memory; has_batch is the same for the
    // batch. The coordinate of such a dimension is always 0.
    bool has_groups, has_batch;
};

// Maps a matrix [rows, columns] with contiguous rows, in boxes of box_columns by box_rows. A row of a box has 128 or 64
// bytes, in which it is swizzled.
struct MatrixMap {
    CUtensorMap encoded;  // aligned to 64 bytes
};

// Encodes a matrix's map. element_bytes is 1 or 2. The base and row_bytes, a row's stride, are multiples of 16 bytes.
MatrixMap matrix_map(const void* data, int32_t element_bytes, int32_t rows, int32_t columns, int64_t row_bytes,
                     int32_t box_rows, int32_t box_columns);

// Encodes a view's map. `rows` counts the rows of all packed sequences. Rows must not overlap, and the heads of a group
// must not share memory, because no document says that the driver takes a stride of 0.
TensorMap tensor_map(const HeadsView<const uint16_t>& view, int32_t rows, int32_t group, int32_t box_rows,
                     int32_t box_columns, DataType dtype);

}  // namespace fastattn
