// The parameters of the kernels of flash-decoding. Strides count elements unless they say otherwise.
#pragma once

#include <cstdint>

#include "host/divisor.h"
#include "host/params.h"

namespace fastattn {

// The format of a cache: elements of the queries' dtype; int8; or fp8, torch's float8_e4m3fn. An element of 8 bits
// times its scale is what it stands for.
enum class CacheFormat : int32_t { k16Bit, kInt8, kFp8 };

constexpr bool is_8bit(CacheFormat format) {
    return format != CacheFormat::k16Bit;
}

// Keys or values of a cache: [blocks, kv_heads, block_rows, head_dim], of 16-bit elements or of 8-bit ones. A
// contiguous cache has a block for each sequence, a paged one for each page. Rows lie as those of a HeadsView. Blocks
// and rows are looked up at every step: their strides have 32 bits, so that an address is two products.
struct CacheView {
    void* data;
    int32_t head_dim;
    int64_t head_bytes;                 // from one head to the next
    uint32_t block_chunks, row_chunks;  // likewise, in chunks of 16 bytes
    float* scales;  // [blocks, kv_heads, block_rows]; null: all are 1, or elements of 16 bits have none
    int64_t scale_head_stride;
    uint32_t scale_block_stride, scale_row_stride;
    bool scales_are_given;  // one for all tokens of a head: read, while those of single tokens are found and written
};

// Where the tokens of a sequence lie. Neither lengths nor tables are trusted: see decode/cache_tokens.cuh.
struct CacheLayout {
    int32_t num_blocks, block_rows;
    Divisor by_block_rows;
    const int32_t* block_table;  // [batch, max_pages], or null: contiguous
    int64_t table_batch_stride, table_page_stride;
};

// Facts of all sequences, which the host knows.
struct SequenceShape {
    int32_t capacity;     // tokens, at most 2^30
    int32_t num_new;      // tokens that this call appends
    int32_t num_queries;  // the last ones of a sequence
    int32_t window_left;  // as in ScoreParams
};

// Which of a sequence's last num_queries tokens each query sees: bytes [batch, num_queries, num_queries], 0 or 1. Null:
// what the window says.
struct TreeMaskView {
    const uint8_t* data;
    int64_t batch_stride, query_stride, token_stride;
};

// Which keys of all sequences each CTA takes: see scheduler/decode_splits.h.
struct SplitSchedule {
    int32_t num_ctas;
    int32_t tiles_per_sequence;  // KV heads times tiles of rows
    int32_t splits_per_tile;     // > 0: a tile has at most so many splits
    int32_t blocks_per_split;    // else a split has so many blocks of keys
    Divisor by_blocks_per_split;
    int32_t min_splits_per_cta;  // but see choose_splits_per_cta()
    int64_t num_tiles;           // of all sequences
    bool splits_are_partials;    // each split leaves a partial; else all splits that a CTA has of a tile leave one
    int32_t slots_per_cta;       // workspace slots
};

// cos and sin of RoPE: [num_positions, half_dim]; the first 2 * half_dim dims of a row are rotated.
struct RotaryParams {
    enum class Kind : int32_t { kNone, kFloat16, kBFloat16, kFloat32, kFloat64 };
    const void *cos, *sin;
    Kind kind;
    int32_t num_positions, half_dim;
    bool interleaved;
};

// Where appended tokens go: token i to the slot that data[i * stride] names, row slot % page_size of page slot /
// page_size. Neither is trusted: a slot that does not exist drops its token, as a negative one does.
struct SlotsView {
    const void* data;
    bool is_int64;  // else int32
    int64_t stride;
    int32_t num_slots, page_size;
    Divisor by_page_size;
};

// decode/append_sm80.cuh.
struct AppendParams {
    HeadsView<const uint16_t> k_new, v_new;  // [tokens, Hkv, D or Dv], the tokens as rows of one batch
    int32_t num_rows;                        // tokens times KV heads
    CacheView k_cache, v_cache;              // a block is a page
    SlotsView slots;
};

// decode/dequantize_sm80.cuh.
struct DequantizeCacheParams {
    CacheView k_cache, v_cache;
    CacheLayout layout;
    const int32_t* seqlens;   // [B]
    uint16_t *k_out, *v_out;  // [B * blocks_per_sequence, kv_heads, block_rows, D or Dv], contiguous
    int32_t batch, kv_heads, blocks_per_sequence, capacity;
};

// decode/split_sm80.cuh.
struct DecodeParams {
    HeadsView<const uint16_t> query;  // [B, Hq, Sq, D]
    HeadsView<uint16_t> out;          // [B, Hq, Sq, Dv]
    RowsView lse;                     // [B, Hq, Sq], natural logarithm
    CacheView k_cache, v_cache;
    CacheLayout layout;
    const int32_t* cache_seqlens;            // [B]
    HeadsView<const uint16_t> k_new, v_new;  // [B, Hkv, num_new, D or Dv]
    RotaryParams rotary;
    SequenceShape sequence;
    int32_t kv_heads, group, row_tiles;  // group: query heads of a KV head
    Divisor by_group, by_row_tiles;
    ScoreParams scores;  // without bias and dropout; beside a tree mask also without window and ALiBi
    TreeMaskView tree_mask;
    SplitSchedule schedule;
    PartialWorkspace
        partials;  // num_slots() and num_counters() of scheduler/decode_splits.h; also null where no tile has rows
};

}  // namespace fastattn
