// The tables of the native backward kernels. BackwardKernels::in_order() in api/kernel_choice.h has the order in which
// a backward pass launches the kernels.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

using BackwardKernelTable = KernelTable<AttentionBackwardParams>;

// Finds which row tiles see which key tiles. Launched only with ranges of keys. For any head dims and dtype.
inline BackwardKernelTable& attention_backward_ranges_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, ranges");
    return table;
}

// Computes delta, shift and log2_sum of every query row, and zeroes the workspace of the kernels below. For any head
// dims.
inline BackwardKernelTable& attention_backward_rows_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, rows");
    return table;
}

// Computes dK and dV (on Hopper only their sums, in key_sums, where a key tile is split), and adds dQ to query_sums.
// Selected by both head dims, dtype and flag. Kernels with the flag have every option. Kernels without it only scale
// scores and mask them by a window.
inline BackwardKernelTable& attention_backward_key_value_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, keys and values");
    return table;
}

// Turns the fp32 sums of dQ into dQ, and on Hopper the sums of dK and dV of split key tiles into dK and dV. Selected by
// the head dim and architecture of the kernel that wrote the sums.
inline BackwardKernelTable& attention_backward_query_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, query");
    return table;
}

// Computes grad_bias. For any head dims.
inline BackwardKernelTable& attention_backward_bias_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, bias");
    return table;
}

// Sums the gradient of the ALiBi slopes over each row tile, into slope_sums. For any head dims.
inline BackwardKernelTable& attention_backward_slopes_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slopes");
    return table;
}

// Computes grad_slopes from slope_sums. For any head dims and dtype.
inline BackwardKernelTable& attention_backward_slope_sums_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slope sums");
    return table;
}

// Computes grad_sinks from lse, shift, log2_sum and delta. For any head dims and dtype.
inline BackwardKernelTable& attention_backward_sinks_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, sinks");
    return table;
}

}  // namespace fastattn
