// The tables of the native forward kernels.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

// Kernels that only scale scores and mask them by a window. Selected by head dim. The flag of a KernelKey says
// whether a kernel takes keys in pages.
inline KernelTable<AttentionForwardParams>& attention_forward_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward");
    return table;
}

// Kernels with every option. Selected by head dim. The flag of a KernelKey says whether a kernel takes keys in
// pages.
inline KernelTable<AttentionForwardParams>& attention_forward_options_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward with options");
    return table;
}

// The kernel that runs before a kernel with options if rows see only ranges of keys. It lists the key tiles that the
// kernel with options visits.
inline KernelTable<AttentionForwardParams>& attention_key_ranges_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward, ranges of keys");
    return table;
}

}  // namespace fastattn
