// The parameters of the flash-decoding kernels. Strides count elements unless a comment says otherwise.
#pragma once

#include <cstdint>

#include "host/divisor.h"
#include "host/params.h"

namespace fastattn {

// The format of a cache's elements: the queries' 16-bit dtype, int8, or fp8 (torch's float8_e4m3fn). The value of an
// 8-bit element is the element times its scale.
enum class CacheFormat : int32_t { k16Bit, kInt8, kFp8 };

constexpr bool is_8bit(CacheFormat format) {
    return format != CacheFormat::k16Bit;
}

// Keys or values of a cache: [blocks, kv_heads, block_rows, head_dim]. A block is a page or, in a contiguous cache, a
// sequence. Rows are aligned like the rows of a HeadsView. The strides of blocks and rows have 32 bits, so that an
// address, which every step computes, takes only two products.
struct CacheView {
    void* data;
    int32_t head_dim;
    int64_t head_bytes;                 // stride of a head
    uint32_t block_chunks, row_chunks;  // strides of a block and of a row, in chunks of 16 bytes
    float* scales;                      // [blocks, kv_heads, block_rows]; null where all are 1 or elements have 16 bits
    int64_t scale_head_stride;
    uint32_t scale_block_stride, scale_row_stride;
    bool scales_are_per_head;  // true: kernels read one for all tokens of a head; false: they write one for each token
};

// Where the tokens of a sequence are in memory. Kernels trust neither lengths nor tables: see decode/cache_tokens.cuh.
struct CacheLayout {
    int32_t num_blocks, block_rows;
    Divisor by_block_rows;
    const int32_t* block_table;  // [batch, max_pages], or null: contiguous
    int64_t table_batch_stride, table_page_stride;
};

// What the host knows about all sequences of a call.
struct SequenceShape {
    int32_t capacity;     // tokens, at most 2^30
    int32_t num_new;      // tokens that this call appends
    int32_t num_queries;  // the last ones of a sequence
    int32_t window_left;  // as in ScoreParams
};

// The tree mask: [batch, queries, tokens] bytes, 1 where a query sees a token, over the last num_queries tokens of a
// sequence. Null: only the window decides.
struct TreeMaskView {
    const uint8_t* data;
    int64_t batch_stride, query_stride, token_stride;
};

// How the keys of all sequences are divided among the CTAs: see scheduler/decode_splits.h.
struct SplitSchedule {
    int32_t num_ctas;
    int32_t tiles_per_sequence;  // KV heads times tiles of rows
    int32_t splits_per_tile;     // > 0: the most splits of a tile; 0: splits have a fixed size
    int32_t blocks_per_split;    // the size of a split where splits_per_tile is 0
    Divisor by_blocks_per_split;
    int32_t min_splits_per_cta;  // 1 instead if choose_splits_per_cta() says so
    int64_t num_tiles;           // of all sequences
    bool splits_are_partials;    // every split leaves a partial; else a CTA leaves one for all its splits of a tile
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

// The slots that appended tokens go to. Token i goes to row slot % page_size of page slot / page_size, where slot is
// data[i * stride]. A token whose slot is negative or does not exist is dropped.
struct SlotsView {
    const void* data;
    bool is_int64;  // else int32
    int64_t stride;
    int32_t num_slots, page_size;
    Divisor by_page_size;
};

// The parameters of decode/append_sm80.cuh.
struct AppendParams {
    HeadsView<const uint16_t> k_new, v_new;  // [tokens, Hkv, D or Dv], the tokens as rows of one batch
    int32_t num_rows;                        // tokens times KV heads
    CacheView k_cache, v_cache;              // a block is a page
    SlotsView slots;
};

// The parameters of decode/dequantize_sm80.cuh.
struct DequantizeCacheParams {
    CacheView k_cache, v_cache;
    CacheLayout layout;
    const int32_t* seqlens;   // [B]
    uint16_t *k_out, *v_out;  // [B * blocks_per_sequence, kv_heads, block_rows, D or Dv], contiguous
    int32_t batch, kv_heads, blocks_per_sequence, capacity;
};

// The parameters of decode/split_sm80.cuh.
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
    ScoreParams scores;  // no bias, no dropout; with a tree mask also no window and no ALiBi
    TreeMaskView tree_mask;
    SplitSchedule schedule;
    PartialWorkspace partials;  // sizes: num_slots(), num_counters() of scheduler/decode_splits.h; may be null
};

}  // namespace fastattn
