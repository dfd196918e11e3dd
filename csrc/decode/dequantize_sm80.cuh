// Dequantises the tokens of 8-bit caches to 16-bit floats: scale * element, rounded once. Used before the attention
// kernels, which read every key of a prompt many times.
//
//   k_out[b * max_pages + p] = k_scale[page] * k_cache[page]     page = block_table[b, p]
//   v_out[b * max_pages + p] = v_scale[page] * v_cache[page]
//
// A CTA converts kDequantizedTokens tokens of a KV head: first keys, then values. A thread converts 8 elements of a
// token at a time: it loads 8 bytes and stores 16. Tokens beyond a sequence's length or without a page are not written.
// Memory bandwidth limits the kernel. Preconditions: those of CacheView; head dims are multiples of 8.
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

// Dequantises tokens [first, end) of one head of a sequence. `out`: row 0 of the head in the sequence's first output
// block; blocks are out_block elements apart.
template <DataType kDataType, CacheFormat kFormat>
FASTATTN_DEVICE void dequantise_tokens(const CacheView& cache, const CacheLayout& layout, int32_t batch,
                                       int32_t kv_head, int32_t first, int32_t end, uint16_t* out, int64_t out_block) {
    const CacheHead<kFormat> head(cache, kv_head);
    const int chunks = cache.head_dim / kChunkElements;
#pragma unroll 1
    for (int index = threadIdx.x; index < (end - first) * chunks; index += kDequantizeThreads) {
        const int32_t token = first + index / chunks, chunk = index % chunks;
        const int32_t page = layout.block_table != nullptr ? page_in_table(layout, batch, token) : -1;
        const TokenLocation location = location_of(layout, batch, token, page);
        if (!location.is_present()) continue;
        const uint2 elements = reinterpret_cast<const uint2*>(head.row(location))[chunk];
        const HeadScale given = head.given_scale();
        const float scale = given.is_per_head ? given.value : *head.scale(location);
        const int32_t block = layout.by_block_rows.quotient(token), row = token - block * layout.block_rows;
        auto* to = reinterpret_cast<uint4*>(out + block * out_block + int64_t{row} * cache.head_dim);
        to[chunk] = dequantised<kDataType, kFormat>(elements, scale);
    }
}

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
    const int64_t first_row =
        (int64_t{batch} * params.blocks_per_sequence * params.kv_heads + kv_head) * layout.block_rows;
    const int64_t rows_of_block = int64_t{params.kv_heads} * layout.block_rows;
    const int32_t head_dim = params.k_cache.head_dim, value_dim = params.v_cache.head_dim;
    dequantise_tokens<kDataType, kFormat>(params.k_cache, layout, batch, kv_head, first, end,
                                          params.k_out + first_row * head_dim, rows_of_block * head_dim);
    dequantise_tokens<kDataType, kFormat>(params.v_cache, layout, batch, kv_head, first, end,
                                          params.v_out + first_row * value_dim, rows_of_block * value_dim);
}

template <DataType kDataType, CacheFormat kFormat>
void launch_decode_dequantize_sm80(LaunchedKernel& kernel, const DequantizeCacheParams& params, Stream stream) {
    const int64_t ctas = int64_t{params.batch} * params.kv_heads * ceil_div(params.capacity, kDequantizedTokens);
    kernel.launch(decode_dequantize_sm80<kDataType, kFormat>, Launch{ctas, kDequantizeThreads, 0}, params, stream);
}

}  // namespace fastattn
