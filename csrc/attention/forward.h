// The tables of the native forward kernels.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

// Kernels for scores that are only scaled and masked by a window. Selected by head dim; variant: keys in pages.
inline KernelTable<AttentionForwardParams>& attention_forward_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward");
    return table;
}

// Kernels with every option. Selected by head dim; variant: keys in pages.
inline KernelTable<AttentionForwardParams>& attention_forward_options_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward with options");
    return table;
}

// Lists the key tiles that the kernels with options visit where rows see ranges of keys.
inline KernelTable<AttentionForwardParams>& attention_key_ranges_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward, ranges of keys");
    return table;
}

}  // namespace fastattn
