// Appends new keys and values: writes them into a tile in shared memory and into the cache.
#pragma once

#include <cstdint>

#include "decode/cache_tokens.cuh"
#include "decode/rotary.cuh"
#include "device/fp8.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// Writes the rows of a tile that hold new tokens, `new_keys` (one bit each), to the tile and to the cache. The token of
// the tile's first row stands at first_position and is at gNew, or would be if it were new. Lane l passes as gRow the
// address in the cache of row l % kRows, null if the row is not to be stored.
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

// Quantises a chunk symmetrically, round(x / scale). The scale is given, or the row's own: max|x| divided by the
// format's largest number; 1 for a row of zeros; NaN for a row that is not finite, so that this shows. kLanesOfRow
// neighbouring lanes pass a chunk of a row each, zeros beyond its end. All lanes of the warp call it.
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
    const bool is_spoiled = !given.is_given && scale != scale;
    if (given.is_given) scale = given.value;
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
        const uint32_t number = is_spoiled ? 0 : quantise<kFormat>(__fdiv_rn(values[i], scale));
        packed[i / 4] |= number << 8 * (i % 4);
    }
    return {{packed[0], packed[1]}, scale};
}

// Does load_new_tokens with rows quantised to kHeadDim bytes each. Their scales go to sScales and, unless the scale is
// given, to the cache: lanes pass their addresses as gScale, like gRow.
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
        if (chunk == 0 && !given.is_given) *gTileScale = quantised.scale;
    }
}

}  // namespace fastattn
