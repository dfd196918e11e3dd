// The native kernels of flash-decoding, as the host sees them.
#pragma once

#include "host/decode_params.h"
#include "host/kernel_table.h"

namespace fastattn {

// By head dim: those in between run in the next larger one, and nothing of what they lack is loaded. variant: int8 caches.
inline KernelTable<DecodeParams>& decode_split_kernels() {
    static auto& table = *new KernelTable<DecodeParams>("attention_decode");
    return table;
}

// Likewise.
inline KernelTable<AppendParams>& decode_append_kernels() {
    static auto& table = *new KernelTable<AppendParams>("append_to_cache");
    return table;
}

}  // namespace fastattn
