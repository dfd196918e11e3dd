// Appends tokens to a paged KV cache, each to the slot that the caller names, as servers do before attention. Keys are
// stored without rotation: the caller applies RoPE.
//
//   page, row = divmod(slots[i], page_size)
//   k_cache[page, :, row] = quantise(k_new[i])     v_cache[page, :, row] = quantise(v_new[i])
//
// A row is one token of one KV head. kHeadDim / 8 neighbouring lanes copy a row, 16 bytes each: first its key, then its
// value. Neighbouring groups of lanes copy neighbouring heads of a token, so a warp reads whole cache lines. For 8-bit
// caches, decode/new_tokens.cuh quantises the rows. Memory bandwidth limits the kernel. Preconditions: those of
// HeadsView and CacheView; head dims are multiples of 8 and at most kHeadDim. If two tokens have the same slot, the
// slot may end up with chunks of both tokens.
#pragma once

#include <cstdint>

#include "decode/cache_tokens.cuh"
#include "decode/decode.h"
#include "decode/new_tokens.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kAppendThreads = 128;

// Returns where to store a token; the location is absent unless the token's slot exists.
FASTATTN_DEVICE TokenLocation location_of_slot(const SlotsView& slots, int32_t token) {
    const int64_t index = token * slots.stride;
    const int64_t slot = slots.is_int64 ? static_cast<const int64_t*>(slots.data)[index]
                                        : int64_t{static_cast<const int32_t*>(slots.data)[index]};
    if (slot < 0 || slot >= slots.num_slots) return {-1, 0};
    const int32_t page = slots.by_page_size.quotient(static_cast<int32_t>(slot));
    return {page, static_cast<int32_t>(slot) - page * slots.page_size};
}

// Copies this lane's chunk of one row from `tokens` to `cache`. Quantises the chunk for an 8-bit cache. Called by all
// lanes of the warp.
template <int kHeadDim, DataType kDataType, CacheFormat kFormat>
FASTATTN_DEVICE void append_chunk(const HeadsView<const uint16_t>& tokens, const CacheView& cache, int32_t token,
                                  int32_t kv_head, TokenLocation location, int chunk) {
    const CacheHead<kFormat> head(cache, kv_head);
    const bool is_stored = location.is_present() && chunk * kChunkElements < cache.head_dim;
    uint4 bits = {0, 0, 0, 0};
    if (is_stored) bits = reinterpret_cast<const uint4*>(row_pointer(tokens, 0, kv_head, token))[chunk];
    if constexpr (is_8bit(kFormat)) {
        const HeadScale given = head.given_scale();
        const QuantisedChunk quantised = quantise_chunk<kFormat, kDataType, kHeadDim / kChunkElements>(bits, given);
        if (!is_stored) return;
        reinterpret_cast<uint2*>(head.row(location))[chunk] = quantised.bytes;
        if (chunk == 0 && !given.is_per_head) *head.scale(location) = quantised.scale;
    } else if (is_stored) {
        reinterpret_cast<uint4*>(head.row(location))[chunk] = bits;
    }
}

template <int kHeadDim, DataType kDataType, CacheFormat kFormat>
__global__ void __launch_bounds__(kAppendThreads) decode_append_sm80(const __grid_constant__ AppendParams params) {
    constexpr int kLanesOfRow = kHeadDim / kChunkElements, kRowsOfCta = kAppendThreads / kLanesOfRow;
    const int64_t row = int64_t{blockIdx.x} * kRowsOfCta + threadIdx.x / kLanesOfRow;
    const int chunk = threadIdx.x % kLanesOfRow;
    const bool is_row = row < params.num_rows;  // lanes without a row take part in the shuffles of quantise_chunk()
    const auto row_or_first = static_cast<uint32_t>(is_row ? row : 0);
    const auto kv_heads = static_cast<uint32_t>(params.k_new.heads);
    const auto token = static_cast<int32_t>(row_or_first / kv_heads);
    const auto kv_head = static_cast<int32_t>(row_or_first % kv_heads);
    const TokenLocation location = is_row ? location_of_slot(params.slots, token) : TokenLocation{-1, 0};
    append_chunk<kHeadDim, kDataType, kFormat>(params.k_new, params.k_cache, token, kv_head, location, chunk);
    append_chunk<kHeadDim, kDataType, kFormat>(params.v_new, params.v_cache, token, kv_head, location, chunk);
}

template <int kHeadDim, DataType kDataType, CacheFormat kFormat>
void launch_decode_append_sm80(LaunchedKernel& kernel, const AppendParams& params, Stream stream) {
    constexpr int kRowsOfCta = kAppendThreads / (kHeadDim / kChunkElements);
    const Launch launch{ceil_div(params.num_rows, kRowsOfCta), kAppendThreads, 0};
    kernel.launch(decode_append_sm80<kHeadDim, kDataType, kFormat>, launch, params, stream);
}

}  // namespace fastattn
