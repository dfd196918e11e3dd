// Dequantises the tokens of 8-bit caches to 16-bit floats: scale * element, rounded once. Used before the attention
// kernels, which read every key of a prompt many times.
//
//   k_out[b * max_pages + p] = k_scale[page] * k_cache[page]     page = block_table[b, p]
//   v_out[b * max_pages + p] = v_scale[page] * v_cache[page]
//
// A CTA converts kDequantizedTokens tokens of a KV head. A thread converts 8 elements of a token's key and 8 of its
// value at a time: it loads 8 bytes of each, and then stores 16 bytes of each. Tokens beyond a sequence's length or
// without a page are not written. Memory bandwidth limits the kernel. Preconditions: those of CacheView; head dims are
// multiples of 8.
#pragma once

#include <cstdint>

#include "decode/cache_decoding.cuh"
#include "decode/cache_tokens.cuh"
#include "decode/decode.h"
#include "device/fragment.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kDequantizeThreads = 128, kDequantizedTokens = 64;

// Returns eight elements times their scale, in kDataType.
template <DataType kDataType, CacheFormat kFormat>
FASTATTN_DEVICE uint4 dequantised(const uint2& elements, float scale) {
    using Decoding = CacheDecoding<kFormat, kDataType>;
    const uint2 first = Decoding::template pairs<kNeighbours>(elements.x);
    const uint2 last = Decoding::template pairs<kNeighbours>(elements.y);
    const uint4 decoded = {first.x, first.y, last.x, last.y};
    const auto pair = [&](int i) {
        const auto value = [&](int k) {
            return element_of<Decoding::kDataType>(decoded, k) * Decoding::kFactor * scale;
        };
        return pack<kDataType>(value(i), value(i + 1));
    };
    return {pair(0), pair(2), pair(4), pair(6)};
}

// Loads eight elements of a token's row and their scale, if the row has that many.
template <CacheFormat kFormat>
struct CachedChunk {
    bool exists;
    uint2 elements = {};
    float scale = 0.0f;

    FASTATTN_DEVICE CachedChunk(const CacheView& cache, const TokenLocation& location, int32_t kv_head, int chunk)
        : exists(chunk * kChunkElements < cache.head_dim) {
        if (!exists) return;
        const CacheHead<kFormat> head(cache, kv_head);
        elements = reinterpret_cast<const uint2*>(head.row(location))[chunk];
        const HeadScale given = head.given_scale();
        scale = given.is_per_head ? given.value : *head.scale(location);
    }

    // Stores the dequantised chunk. out: where the row begins.
    template <DataType kDataType>
    FASTATTN_DEVICE void store(uint16_t* out, int chunk) const {
        if (exists) reinterpret_cast<uint4*>(out)[chunk] = dequantised<kDataType, kFormat>(elements, scale);
    }
};

template <DataType kDataType, CacheFormat kFormat>
__global__ void __launch_bounds__(kDequantizeThreads)
    decode_dequantize_sm80(const __grid_constant__ DequantizeCacheParams params) {
    const CacheLayout& layout = params.layout;
    const auto blocks = static_cast<uint32_t>(ceil_div(params.capacity, kDequantizedTokens));
    const int32_t first = static_cast<int32_t>(blockIdx.x % blocks) * kDequantizedTokens;
    const int32_t head = static_cast<int32_t>(blockIdx.x / blocks);
    const int32_t batch = head / params.kv_heads, kv_head = head % params.kv_heads;
    const int32_t end = min(first + kDequantizedTokens, min(params.seqlens[batch], params.capacity));
    if (first >= end) return;
    const int chunks = max(params.k_cache.head_dim, params.v_cache.head_dim) / kChunkElements;
#pragma unroll 1
    for (int index = threadIdx.x; index < (end - first) * chunks; index += kDequantizeThreads) {
        const int32_t token = first + index / chunks, chunk = index % chunks;
        const int32_t page = layout.block_table != nullptr ? page_in_table(layout, batch, token) : -1;
        const TokenLocation location = location_of(layout, batch, token, page);
        if (!location.is_present()) continue;
        const int32_t block = layout.by_block_rows.quotient(token);
        const int64_t head_block = (int64_t{batch} * params.blocks_per_sequence + block) * params.kv_heads + kv_head;
        const int64_t row = head_block * layout.block_rows + (token - block * layout.block_rows);
        const CachedChunk<kFormat> key(params.k_cache, location, kv_head, chunk);
        const CachedChunk<kFormat> value(params.v_cache, location, kv_head, chunk);
        key.template store<kDataType>(params.k_out + row * params.k_cache.head_dim, chunk);
        value.template store<kDataType>(params.v_out + row * params.v_cache.head_dim, chunk);
    }
}

template <DataType kDataType, CacheFormat kFormat>
void launch_decode_dequantize_sm80(LaunchedKernel& kernel, const DequantizeCacheParams& params, Stream stream) {
    const int64_t ctas = int64_t{params.batch} * params.kv_heads * ceil_div(params.capacity, kDequantizedTokens);
    kernel.launch(decode_dequantize_sm80<kDataType, kFormat>, Launch{ctas, kDequantizeThreads, 0}, params, stream);
}

}  // namespace fastattn
