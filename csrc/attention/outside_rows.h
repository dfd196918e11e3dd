// The kernel that fills the rows of packed results that lie outside of all sequences, or behind the first max_seqlen
// rows of a sequence. Other kernels leave these rows as they are.
#pragma once

#include <cstdint>

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

struct OutsideRowsParams {
    static constexpr int kMostTensors = 3;
    static constexpr int kChunkBytes = 16;

    // A packed tensor [total, heads, chunks], in chunks of 16 bytes, whose rows outside become zero. The base and the
    // strides are multiples of a chunk.
    struct PackedTensor {
        char* data;
        const int32_t* cu_seqlens;  // [batch + 1]
        int32_t batch, total, max_seqlen, heads, chunks;
        int64_t row_bytes, head_bytes;  // strides
    };

    PackedTensor tensors[kMostTensors];
    int32_t num_tensors, num_ctas;
    RowsView lse;  // becomes -inf for the rows outside of tensors[0]; data may be null
};

inline KernelTable<OutsideRowsParams>& attention_outside_rows_kernels() {
    static auto& table = *new KernelTable<OutsideRowsParams>("attention, rows outside of sequences");
    return table;
}

}  // namespace fastattn
