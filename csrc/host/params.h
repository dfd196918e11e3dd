// What the host tells a kernel: plain structs, with shape and strides beside every pointer. Strides count elements.
#pragma once

#include <cstdint>

struct CUstream_st;  // what a cudaStream_t points to

namespace fastattn {

using Stream = CUstream_st*;

enum class DataType { kFloat16, kBFloat16 };

inline const char* to_string(DataType dtype) {
    return dtype == DataType::kFloat16 ? "float16" : "bfloat16";
}

// [batch, heads, rows, head_dim] of 16-bit elements. The last dim is contiguous; the base and every other dim's stride
// are multiples of 16 bytes, so that rows can be copied 16 bytes at a time.
template <typename Element>
struct HeadsView {
    Element* data;
    int32_t batch, heads, rows, head_dim;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch, heads, rows] fp32, contiguous: one number for each row of a HeadsView.
struct RowsView {
    float* data;
    int32_t batch, heads, rows;
};

struct AttentionForwardParams {
    HeadsView<const uint16_t> query;  // [B, Hq, Sq, D]
    HeadsView<const uint16_t> key;    // [B, Hkv, Sk, D]
    HeadsView<const uint16_t> value;  // [B, Hkv, Sk, D]
    HeadsView<uint16_t> out;          // [B, Hq, Sq, D]
    RowsView lse;                     // [B, Hq, Sq], natural logarithm
    float scale;                      // of Q·Kᵀ; any sign
    int32_t causal_offset;            // causal: query i sees keys j <= i + causal_offset
    int32_t heads_per_group;          // heads whose tiles are scheduled side by side, see attention/tile_order.h
};

}  // namespace fastattn
