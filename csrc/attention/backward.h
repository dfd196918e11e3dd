// The tables of the native backward kernels, in the order in which a backward pass launches them.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

using BackwardKernelTable = KernelTable<AttentionBackwardParams>;

// Finds which row tiles see which key tiles, where rows see ranges of keys. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_ranges_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, ranges");
    return table;
}

// Computes delta, shift and log2_sum of every query row, and zeroes the workspace of the kernels below. Any head dims.
inline BackwardKernelTable& attention_backward_rows_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, rows");
    return table;
}

// Computes dK and dV, and adds dQ to query_sums. Selected by head dim and variant: true for every option, false for
// scores that are only scaled and masked by a window.
inline BackwardKernelTable& attention_backward_key_value_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, keys and values");
    return table;
}

// Turns the fp32 sums of dQ, and on Hopper those of dK and dV of split key tiles, into gradients. Selected by the head
// dim and architecture of the kernel that wrote the sums.
inline BackwardKernelTable& attention_backward_query_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, query");
    return table;
}

// Computes grad_bias. Any head dims.
inline BackwardKernelTable& attention_backward_bias_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, bias");
    return table;
}

// Sums the gradient of the ALiBi slopes over each row tile, into slope_sums. Any head dims.
inline BackwardKernelTable& attention_backward_slopes_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slopes");
    return table;
}

// Computes grad_slopes from slope_sums. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_slope_sums_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, slope sums");
    return table;
}

// Computes grad_sinks from lse and delta. Any head dims and dtype.
inline BackwardKernelTable& attention_backward_sinks_kernels() {
    static auto& table = *new BackwardKernelTable("attention_backward, sinks");
    return table;
}

}  // namespace fastattn
