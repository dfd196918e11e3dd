// The native forward kernels, as the host sees them.
#pragma once

#include "host/kernel_table.h"
#include "host/params.h"

namespace fastattn {

// By head dim; there are no variants.
inline KernelTable<AttentionForwardParams>& attention_forward_kernels() {
    static auto& table = *new KernelTable<AttentionForwardParams>("attention_forward");
    return table;
}

// By head dim; variant: keys in pages.
inline KernelTable<AttentionOptionsParams>& attention_forward_options_kernels() {
    static auto& table = *new KernelTable<AttentionOptionsParams>("attention_forward with options");
    return table;
}

}  // namespace fastattn
