// The tables of the native kernels of flash-decoding.
#pragma once

#include <array>
#include <cstdint>

#include "host/decode_params.h"
#include "host/kernel_table.h"

namespace fastattn {

inline constexpr int32_t kFewRows = 16;  // rows of the small tile, used if no KV head has more rows

// Returns the flash-decoding kernels for caches of a format, selected by head dim and flag. A head dim that has no
// kernel runs in the kernel of the next larger head dim, which loads only the dims that exist. Kernels with the flag
// have tiles of more than kFewRows rows.
inline KernelTable<DecodeParams>& decode_split_kernels(CacheFormat format) {
    using Table = KernelTable<DecodeParams>;
    constexpr const char* kOperation = "attention_decode";
    static auto& tables = *new std::array<Table, 3>{Table(kOperation), Table(kOperation), Table(kOperation)};
    return tables[static_cast<int32_t>(format)];
}

// Returns the kernels that append to caches of a format, selected by head dim as in decode_split_kernels().
inline KernelTable<AppendParams>& decode_append_kernels(CacheFormat format) {
    using Table = KernelTable<AppendParams>;
    constexpr const char* kOperation = "append_to_cache";
    static auto& tables = *new std::array<Table, 3>{Table(kOperation), Table(kOperation), Table(kOperation)};
    return tables[static_cast<int32_t>(format)];
}

// Returns the kernels that dequantise an 8-bit cache. Each kernel takes any head dim.
inline KernelTable<DequantizeCacheParams>& decode_dequantize_kernels(CacheFormat format) {
    using Table = KernelTable<DequantizeCacheParams>;
    constexpr const char* kOperation = "dequantize_cache";
    static auto& tables = *new std::array<Table, 3>{Table(kOperation), Table(kOperation), Table(kOperation)};
    return tables[static_cast<int32_t>(format)];
}

// Returns the part of a kernel's name that says the cache's format, empty for 16-bit caches.
inline const char* name_of(CacheFormat format) {
    return format == CacheFormat::kInt8 ? "int8" : format == CacheFormat::kFp8 ? "fp8" : "";
}

}  // namespace fastattn
