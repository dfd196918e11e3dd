// The parameters of kernels: plain structs, with shape and strides beside every pointer. Strides count elements.
#pragma once

#include <cstdint>

#include "host/divisor.h"
#include "host/host_device.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace fastattn {

using Stream = CUstream_st*;

enum class DataType { kFloat16, kBFloat16 };

inline const char* to_string(DataType dtype) {
    return dtype == DataType::kFloat16 ? "float16" : "bfloat16";
}

// [batch, heads, rows, head_dim] of 16-bit elements. The last dim is contiguous; the base and every other dim's stride
// are multiples of 16 bytes, so that rows can be copied 16 bytes at a time. Rows do not overlap. Heads, or the batch,
// may be the same memory, with a stride of 0.
template <typename Element>
struct HeadsView {
    Element* data;
    int32_t batch, heads, rows, head_dim;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch, heads, rows] fp32, the last dim contiguous: one number for each row of a HeadsView.
struct RowsView {
    float* data;
    int32_t batch, heads, rows;
    int64_t batch_stride, head_stride;
};

// A bias, which is added to scores: [batch, heads, rows, keys], with strides of 0 where one number stands for many.
// kBool says which keys a row may see.
struct BiasView {
    enum class Kind : int32_t { kNone, kBool, kFloat16, kBFloat16, kFloat32 };
    const void* data;
    Kind kind;
    int64_t batch_stride, head_stride, row_stride, key_stride;
    bool in_pairs;  // those of keys 2i and 2i + 1 lie side by side, aligned to the size of both

    FASTATTN_HOST_DEVICE int64_t element_bytes() const {
        return kind == Kind::kBool ? 1 : kind == Kind::kFloat32 ? 4 : 2;
    }
};

// Packed sequences: views then have a batch of sequences, a batch stride of 0 and the bound of all lengths as rows.
// The numbers in cu_seqlens are not trusted: see device/sequence.cuh.
struct PackedParams {
    const int32_t* cu_seqlens_q;  // [batch + 1], or null: dense
    const int32_t* cu_seqlens_k;
    int32_t total_q, total_k;
};

// Between pages, and between the rows of one, in chunks of 16 bytes: 32 bits each, so that an address is two products.
struct PageStrides {
    uint32_t page, row;
};

// Packed queries over keys in pages: the views of keys and values then have a page as a batch, and the bound of all
// lengths as rows. The lengths are differences of cu_seqlens_k. Neither these nor the table are trusted: see
// device/paged_rows.cuh.
struct PagedParams {
    const int32_t* block_table;  // [batch, max_pages], or null: keys lie in no pages, or there are none
    int32_t max_pages, page_size;
    Divisor by_page_size;
    PageStrides key, value;
};

// The workspace slots of partials: values [slots, rows of a tile, Dv], and maximum and sum of each row [slots, rows of
// a tile, 2]; see scheduler/partial_tree.h. arrivals: kCombineRounds counters for each CTA, see scheduler/arrivals.cuh.
// All are null where no tile can be split.
struct PartialWorkspace {
    float *values, *sums;
    uint64_t* arrivals;
    uint64_t launch_id;
};

// Ranges of keys, [batch, heads, rows, num, 2] of int32, aligned to 8 bytes: a row sees the keys of its ranges
// [begin, end) alone. Strides count ranges, and are 0 where one stands for many. Packed: the rows of all sequences
// follow each other, and the batch stride is 0. The numbers are not trusted.
inline constexpr int32_t kMostRanges = 4, kMostRowsWithRanges = 192;
struct KeyRangesView {
    const int32_t* data;  // null: rows see all keys
    int32_t batch, heads, num;
    int64_t batch_stride, head_stride;
};

// The tiles of packed sequences lie one after the other, with a spare one for each sequence, so that nobody has to know
// the lengths: one of `length` rows needs at most length / block_m + 1, rounded as the starts are. Returns the index of
// the first tile of sequence `batch`, which starts at row `begin`. Where a sequence after the last would start, it is
// the number of all tiles.
template <typename Number>
FASTATTN_HOST_DEVICE constexpr Number first_packed_tile(Number batch, Number begin, int32_t block_m) {
    return begin / block_m + batch;
}

// Which tiles of keys each tile of rows sees through its ranges: `pitch` numbers. The kernel that writes them says what
// they mean (attention/key_ranges_sm80.cuh, attention/backward_ranges_sm80.cuh). Strides count numbers.
struct SeenTiles {
    int32_t* data;
    int32_t block_m, block_n, num_key_tiles, pitch;
    bool is_packed;
    int64_t batch_stride, head_stride;

    // The pitch of attention/backward_ranges_sm80.cuh: two words for every 32 tiles of keys, also where there are none.
    static int32_t pitch_of_bits(int32_t num_key_tiles) { return 2 * (num_key_tiles / 32 + 1); }

    // Returns where the numbers of a tile of rows begin. tile: in its sequence; first_row: the sequence's first row in
    // the packed tensor.
    FASTATTN_HOST_DEVICE int32_t* of(int32_t batch, int32_t head, int32_t tile, int32_t first_row) const {
        const int64_t idx = tile + (is_packed ? first_packed_tile(batch, first_row, block_m) : 0);
        return data + batch * batch_stride + head * head_stride + idx * pitch;
    }
};

// Where the first row, key and head of a call stand in a larger one, of which it is a block: dropout draws by positions
// there.
struct DropoutOrigin {
    uint32_t row, key, head;  // key % 4 == 0
};

// How Q·Kᵀ becomes scores, and which of them count.
struct ScoreParams {
    static constexpr int32_t kUnbounded = INT32_MAX, kLastRowAtLastKey = INT32_MIN;
    float scale;    // of Q·Kᵀ; any sign
    float softcap;  // 0: none
    float scale_over_softcap;
    int32_t window_left, window_right;  // keys that a row sees on either side of its position, or kUnbounded: all
    // Row i stands at key i + query_offset.
    int32_t query_offset = kLastRowAtLastKey;
    BiasView bias;
    KeyRangesView ranges;
    const float* alibi_slopes;  // [batch, heads], or null
    int64_t alibi_batch_stride;
    const float* sinks;           // [heads], or null
    const int64_t* dropout_seed;  // [1], or null: no dropout
    uint32_t dropout_threshold;   // words below it drop
    float dropout_factor = 1.0f;  // of what is kept; 1 without dropout
    DropoutOrigin dropout_origin;

    bool has_window() const { return window_left != kUnbounded || window_right != kUnbounded; }
};

// attention/forward_*.cuh. Those without options compute scores that are only scaled and masked by a window. Head dims
// may be smaller than the kernel's, and differ.
struct AttentionForwardParams {
    HeadsView<const uint16_t> query;  // [B, Hq, Sq, D]
    HeadsView<const uint16_t> key;    // [B, Hkv, Sk, D]
    HeadsView<const uint16_t> value;  // [B, Hkv, Sk, Dv]
    HeadsView<uint16_t> out;          // [B, Hq, Sq, Dv]
    HeadsView<float> exact_out;       // the same in fp32, written instead where data is not null
    RowsView lse;                     // [B, Hq, Sq], natural logarithm
    float* max_logits;                // [Hq], -inf before the launch; or null: nobody wants the largest scores
    PackedParams packed;
    ScoreParams scores;
    float scale_log2;         // the absolute value of scores.scale, times log2(e), or 1 where that is 0
    int32_t heads_per_group;  // heads whose tiles are scheduled side by side, see scheduler/work_tile.h
    PagedParams paged;        // for the kernels that take pages
    SeenTiles seen_tiles;     // beside scores.ranges
    // Null where no tile is split; resident_ctas: how many CTAs run at a time. See scheduler/key_splits.h.
    PartialWorkspace partials;
    int32_t resident_ctas;
    // How many work tiles have been claimed (scheduler/arrivals.cuh), for Hopper's kernels. Null: cluster c of n takes
    // work tiles c, c + n, c + 2n and so on.
    uint64_t* claimed;
    uint64_t launch_id;
};

// The gradient of a bias: [batch, heads, rows, keys] fp32 with the bias's own sizes, 1 where it was broadcast.
struct BiasGradientView {
    float* data;
    int32_t batch, heads, rows, keys;
    int64_t batch_stride, head_stride, row_stride, key_stride;
};

// The gradient of ALiBi slopes: [batch, heads] fp32, contiguous, with a batch of 1 where they were broadcast.
struct SlopesGradientView {
    float* data;
    int32_t batch;
};

// The terms of query rows for the backward kernels for Hopper, in blocks of block_m rows of a head, one for each tile
// of dQ's sums and in their order (attention/query_gradient.h): first of every row shift * log2(e), then -delta. Rows
// that do not exist have shift +inf and delta 0. For the kernels with options: shift itself, -delta and log2_sum.
struct RowTermsView {
    float* data;  // null: nobody wants it
    int32_t block_m;
    bool with_options;

    FASTATTN_HOST_DEVICE static constexpr int32_t numbers_per_row(bool with_options) { return with_options ? 3 : 2; }
};
inline constexpr int kMostRowsInBlock = 128;

inline constexpr int kSlopesBlockM = 64;

// The splits of a tile of keys: from tile first_tile on, over_heads over the query heads, times up to over_rows over
// the query rows. See scheduler/row_splits.h.
struct RowSplits {
    uint32_t first_tile;
    int32_t over_heads, over_rows;
};

// `floats` numbers, a multiple of four, aligned to 128 bytes.
struct WorkspaceMemory {
    float* data;
    int64_t floats;
};

// attention/backward_*.cuh, the kernels of one backward pass in the order in which they run: ranges, where there are
// ranges of keys, then rows, key_value, query, and where they are asked for bias, sinks, slopes and slope_sums. Packed
// sequences as in AttentionForwardParams.
struct AttentionBackwardParams {
    HeadsView<const uint16_t> query, key, value, out, grad_out;
    HeadsView<uint16_t> grad_query, grad_key, grad_value;
    HeadsView<float> sum_query, sum_key, sum_value;  // gradients are added to these instead, unless data is null
    RowsView lse;                                    // of the forward pass
    RowsView grad_lse;                               // data is null where nobody used the lse
    // Workspace, one number for each query row, laid out like lse. A probability is
    // exp(score - shift) / 2^log2_sum; shift is +inf where a row sees nothing.
    RowsView shift, delta;  // delta = rowsum(dO * O) - dlse
    RowsView log2_sum;      // data is null unless the bias is additive: see backward_rows_sm80.cuh
    // Holds query_sums, key_sums and all counters. The kernel `rows` zeroes it for key_value.
    WorkspaceMemory to_zero;
    float* query_sums;  // of dQ: see attention/query_gradient.h
    // Counters. semaphores: one for each tile of rows of a head (scheduler/semaphore.cuh); null: dQ is added up in any
    // order. num_claimed: how many work tiles (a tile of keys, or a split of one) CTAs have claimed; used with
    // semaphores, and by Hopper's kernels.
    int32_t *semaphores, *num_claimed;
    RowTermsView row_terms;  // for the kernels for Hopper, as all up to `packed`
    // Sums of dK and dV of split tiles (attention/query_gradient.h), and their semaphores.
    RowSplits row_splits;
    float* key_sums;
    int32_t* key_semaphores;
    PackedParams packed;
    ScoreParams scores;
    SeenTiles seen_tiles;            // beside scores.ranges
    BiasGradientView grad_bias;      // data is null where nobody wants it
    SlopesGradientView grad_slopes;  // likewise
    // Workspace of grad_slopes, [tiles of kSlopesBlockM rows, heads], numbered as in attention/query_gradient.h.
    float* slope_sums;
    float* grad_sinks;        // [heads], or null
    int32_t heads_per_group;  // key heads whose tiles are scheduled side by side, see scheduler/work_tile.h
};

}  // namespace fastattn
