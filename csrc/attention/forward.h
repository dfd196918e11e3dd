// The native forward kernels, as the host sees them.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

// Scores that are only scaled and masked by a window, which cost neither loop anything. By head dim; variant: keys in
// pages.
inline KernelTable<AttentionForwardParams>& attention_forward_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward");
    return table;
}

// Any scores. By head dim; variant: keys in pages.
inline KernelTable<AttentionForwardParams>& attention_forward_options_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward with options");
    return table;
}

// The lists of tiles that the others visit where rows see ranges of keys.
inline KernelTable<AttentionForwardParams>& attention_key_ranges_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward, ranges of keys");
    return table;
}

}  // namespace fastattn
