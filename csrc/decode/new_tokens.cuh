// Appends new keys and values: writes them into a tile in shared memory and into the cache.
#pragma once

#include <cstdint>

#include "decode/cache_tokens.cuh"
#include "decode/rotary.cuh"
#include "device/fp8.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// Writes the new tokens of a tile to the tile and to the cache. new_keys: bit r says that row r holds a new token.
// first_position: the position of row 0's token. gNew: the address of row 0's token among the new tokens; other rows
// follow row_stride elements apart. If row 0 is not new, gNew points to where its token would be, before the first new
// token. gRow: lane l passes the cache address of row l % kRows, or null if the row is not stored.
template <DataType kDataType, int kHeadDim, int kRows>
FASTATTN_DEVICE void load_new_tokens(const WarpTile<kHeadDim, kRows>& tile, const uint16_t* gNew, int64_t row_stride,
                                     int head_dim, uint32_t new_keys, const RotaryParams* rotary,
                                     int32_t first_position, char* gRow) {
    using Tile = WarpTile<kHeadDim, kRows>;
#pragma unroll 1
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
        const int row = tile.row + pass * Tile::kRowStep;
        char* const gTileRow = from_lane(gRow, row);
        if ((new_keys >> row & 1) == 0) continue;
        uint4 bits = {0, 0, 0, 0};
        if (tile.chunk * kChunkElements < head_dim) {
            bits = load_rotated<kDataType>(rotary, gNew + row * row_stride, tile.chunk, first_position + row);
            if (gTileRow != nullptr) reinterpret_cast<uint4*>(gTileRow)[tile.chunk] = bits;
        }
        *reinterpret_cast<uint4*>(tile.sTile + tile.chunk_offset(pass)) = bits;
    }
}

// A chunk of a row in 8 bits, and the scale of its row.
struct QuantisedChunk {
    uint2 bytes;
    float scale;
};

// The largest number of the format. A row's own scale maps the row's largest element to it.
template <CacheFormat kFormat>
inline constexpr float kLargestElement = kFormat == CacheFormat::kFp8 ? kLargestFp8 : 127.0f;

// Returns the byte of ratio = x / scale, rounded to nearest even and clamped to the format's largest number.
template <CacheFormat kFormat>
FASTATTN_DEVICE uint32_t quantise(float ratio) {
    if constexpr (kFormat == CacheFormat::kFp8) return encode_fp8(ratio);
    return static_cast<uint32_t>(static_cast<int32_t>(fminf(fmaxf(rintf(ratio), -127.0f), 127.0f))) & 0xff;
}

// Quantises a chunk symmetrically: round(x / scale). The scale is given, or the row's own. A row's own scale is max|x|
// divided by the format's largest number; 1 for a row of zeros; and NaN for a row with NaN or infinity, so that the row
// dequantises to NaN. kLanesOfRow neighbouring lanes pass one chunk of a row each, and zeros beyond the row's end.
// Called by all lanes of the warp.
template <CacheFormat kFormat, DataType kDataType, int kLanesOfRow>
FASTATTN_DEVICE QuantisedChunk quantise_chunk(uint4 bits, const HeadScale& given) {
    float values[kChunkElements], largest = 0.0f, spoiled = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
        values[i] = element_of<kDataType>(bits, i);
        largest = fmaxf(largest, fabsf(values[i]));  // ignores NaN
        spoiled += values[i] * 0.0f;
    }
#pragma unroll
    for (int distance = 1; distance < kLanesOfRow; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        spoiled += __shfl_xor_sync(0xffffffff, spoiled, distance);
    }
    float scale = __fdiv_rn(largest, kLargestElement<kFormat>);
    scale = (scale == 0.0f ? 1.0f : scale) + spoiled;
    const bool is_spoiled = !given.is_per_head && scale != scale;
    if (given.is_per_head) scale = given.value;
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
        const uint32_t number = is_spoiled ? 0 : quantise<kFormat>(__fdiv_rn(values[i], scale));
        packed[i / 4] |= number << 8 * (i % 4);
    }
    return {{packed[0], packed[1]}, scale};
}

// Does what load_new_tokens() does, with rows quantised to kHeadDim bytes each. Writes the scale of each row to sScales
// and, unless the scale is given, to the cache. gScale: lane l passes the cache address of the scale of row l % kRows.
template <CacheFormat kFormat, DataType kDataType, int kHeadDim, int kRows>
FASTATTN_DEVICE void quantise_new_tokens(char* sTile, float* sScales, const uint16_t* gNew, int64_t row_stride,
                                         int head_dim, uint32_t new_keys, const RotaryParams* rotary,
                                         int32_t first_position, char* gRow, float* gScale,
                                         const CacheHead<kFormat>& head, int lane) {
    constexpr int kLanesOfRow = kHeadDim / kChunkElements;
    constexpr int kRowsPerPass = kWarpSize / kLanesOfRow;
    const int chunk = lane % kLanesOfRow;
#pragma unroll 1
    for (int row = lane / kLanesOfRow; row < kRows; row += kRowsPerPass) {
        char* const gTileRow = from_lane(gRow, row);
        float* const gTileScale = from_lane(gScale, row);
        const bool row_is_new = (new_keys >> row & 1) != 0, has_dims = chunk * kChunkElements < head_dim;
        uint4 bits = {0, 0, 0, 0};
        if (row_is_new && has_dims) {
            bits = load_rotated<kDataType>(rotary, gNew + row * row_stride, chunk, first_position + row);
        }
        const HeadScale given = head.given_scale();
        const QuantisedChunk quantised = quantise_chunk<kFormat, kDataType, kLanesOfRow>(bits, given);
        if (!row_is_new) continue;
        using Layout = Swizzle<kHeadDim / 2>;
        reinterpret_cast<uint2*>(sTile + Layout::offset(row, chunk / 2))[chunk % 2] = quantised.bytes;
        if (chunk == 0) sScales[row] = quantised.scale;
        if (gTileRow == nullptr) continue;
        if (has_dims) reinterpret_cast<uint2*>(gTileRow)[chunk] = quantised.bytes;
        if (chunk == 0 && !given.is_per_head) *gTileScale = quantised.scale;
    }
}

}  // namespace fastattn
