// The native backward kernels, as the host sees them, in the order in which they run.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

using BackwardKernelTable = KernelTable<AttentionBackwardParams>;

// Which tiles of rows and keys meet, of calls with ranges of keys. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_ranges_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, ranges");
    return table;
}

// delta, shift and log2_sum of every query row, and zeros for the sums of the others. Any head dims.
inline BackwardKernelTable& attention_backward_rows_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, rows");
    return table;
}

// dK and dV, and dQ into query_sums; by head dim. variant: with options; without them scores are only scaled, and
// masked by a window.
inline BackwardKernelTable& attention_backward_key_value_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, keys and values");
    return table;
}

// dQ, and on Hopper dK and dV of split tiles, out of the sums of the kernel of this head dim and architecture.
inline BackwardKernelTable& attention_backward_query_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, query");
    return table;
}

// grad_bias. Any head dims.
inline BackwardKernelTable& attention_backward_bias_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, bias");
    return table;
}

// Sums the slopes' gradient over each tile of rows, into slope_sums. Any head dims.
inline BackwardKernelTable& attention_backward_slopes_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slopes");
    return table;
}

// grad_slopes, out of slope_sums. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_slope_sums_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slope sums");
    return table;
}

// grad_sinks, from lse and delta. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_sinks_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, sinks");
    return table;
}

}  // namespace fastattn
