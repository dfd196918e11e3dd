"""Computes the gradient of ALiBi slopes: dslope = sum of -dS * |i + Sk - Sq - j| over rows i and keys j.

A CTA recomputes dS for every num_splits-th tile of a head's query rows, in a fixed order, and stores one sum, so that
no atomics are needed. The launcher adds up the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    NO_BIAS,
    NOT_SPECIALIZED,
    DropoutInputs,
    ScoreInputs,
    dropout_keep,
    load_rows,
    masked_tile,
    score_gradients,
    sequence_range,
)
from fastattn.triton_kernels.attention_ranges import tiles_of_rows
from fastattn.triton_kernels.tiles import ceil_div

# ENOUGH_CTAS fill any GPU. A head is split among LEAST_SPLITS CTAs even if one CTA per head would fill the GPU, because
# the longest sequence may be much longer than the others. Both numbers bound the workspace: one fp32 number per CTA.
ENOUGH_CTAS = 2048
LEAST_SPLITS = 16


def slopes_splits(num_heads: int, num_m_tiles: int) -> int:
    """Returns among how many CTAs a head's row tiles are split; ``num_heads`` counts the heads of all sequences."""
    return min(num_m_tiles, max(LEAST_SPLITS, ceil_div(ENOUGH_CTAS, num_heads)))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_slopes_kernel(
    grad_out, query, key, value, row_shift, row_log2_sum, delta, slope_sums,
    bias, alibi_slopes, dropout_seed, ranges, tiles, cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_lb, stride_lh, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h, stride_tiles_b, stride_tiles_h, num_listed,
    num_heads, group_size, max_seqlen_q, max_seqlen_k, total_q, total_k,
    scale, window_left, window_right, softcap, dropout_threshold, dropout_factor,
    query_offset, dropout_row, dropout_key, dropout_head, num_splits,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Computes slope_sums ``[B, Hq, num_splits]``. Grid: one CTA for each sum."""
    tl.static_assert(ALIBI)
    split = tl.program_id(0) % num_splits
    batch_head = tl.program_id(0) // num_splits
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // group_size
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    begin_k, seqlen_k = sequence_range(cu_seqlens_k, batch, total_k, max_seqlen_k)
    begin_row, begin_key = tl.cast(begin_q, tl.int64), tl.cast(begin_k, tl.int64)
    offset = query_offset if PLACED else seqlen_k - seqlen_q

    q_base = query + batch * stride_qb + head * stride_qh + begin_row * stride_qm
    g_base = grad_out + batch * stride_gb + head * stride_gh + begin_row * stride_gm
    k_base = key + batch * stride_kb + kv_head * stride_kh + begin_key * stride_kn
    v_base = value + batch * stride_vb + kv_head * stride_vh + begin_key * stride_vn
    slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
    seed = 0
    if RANGES > 0:
        ranges += batch * stride_ranges_b + head * stride_ranges_h + begin_row * (2 * RANGES)
    if BIAS != NO_BIAS:
        bias += batch * stride_bias_b + head * stride_bias_h
    if DROPOUT:
        seed = tl.load(dropout_seed)
    inputs = ScoreInputs(
        slope, ranges, bias, stride_bias_m, stride_bias_n, offset, seqlen_q, seqlen_k, window_left, window_right,
        scale, softcap,
    )  # fmt: skip
    dropout = DropoutInputs(
        seed, dropout_threshold, dropout_factor, dropout_head + batch_head, dropout_row, dropout_key
    )

    sums = tl.zeros([BLOCK_M], tl.float32)
    for m_tile in range(split, tl.cdiv(seqlen_q, BLOCK_M), num_splits):
        first_row = m_tile * BLOCK_M
        last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
        q = load_rows(q_base, first_row, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK)
        grad = load_rows(g_base, first_row, seqlen_q, stride_gm, BLOCK_M, VALUE_DIM, WIDTH_V)
        row = first_row + tl.arange(0, BLOCK_M)
        position = batch * stride_lb + head * stride_lh + begin_row + row
        shift = tl.load(row_shift + position, mask=row < seqlen_q, other=INF)
        delta_tile = tl.load(delta + position, mask=row < seqlen_q, other=0.0)
        log2_sum = delta_tile
        if BIAS == ADDITIVE_BIAS:
            log2_sum = tl.load(row_log2_sum + position, mask=row < seqlen_q, other=0.0)
        begin, _full_begin, _full_end, end, listed = tiles_of_rows(
            tiles, batch, head, stride_tiles_b, stride_tiles_h, num_listed, begin_q, cu_seqlens_q, first_row, last_row,
            offset, window_left, window_right, seqlen_k, BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES,
        )  # fmt: skip
        for step in range(end - begin):
            first_key = masked_tile(step, begin, end, end, listed, RANGES) * BLOCK_N
            k = load_rows(k_base, first_key, seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK)
            v = load_rows(v_base, first_key, seqlen_k, stride_vn, BLOCK_N, VALUE_DIM, WIDTH_V)
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            grad_products = tl.dot(grad, tl.trans(v), input_precision="ieee")
            keep = True
            if DROPOUT:
                keep = dropout_keep(dropout, first_row, first_key, BLOCK_M, BLOCK_N, BIAS)
            column = first_key + tl.arange(0, BLOCK_N)
            _p, ds, _grad_products = score_gradients(
                products, grad_products, keep, shift[:, None], log2_sum[:, None], delta_tile[:, None],
                row[:, None], column[None, :], inputs, dropout,
                LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED=True,
            )  # fmt: skip
            distance = tl.abs(row[:, None] + offset - column[None, :])
            sums -= tl.sum(ds * distance.to(tl.float32), 1)
    tl.store(slope_sums + tl.program_id(0), tl.sum(sums, 0))
