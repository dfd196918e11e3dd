"""Computes dQ of attention: one CTA owns BLOCK_M query rows of one head and walks over the keys that they see.

P  = exp(Q K^T - lse)         [BLOCK_M, BLOCK_N]
dS = P (dropout(dO V^T) - delta)
dQ += scale * dS K
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
    finish_rows,
    full_tile,
    is_finite,
    load_rows,
    masked_tile,
    score_gradients,
    sequence_range,
)
from fastattn.triton_kernels.attention_ranges import tiles_of_rows


@triton.jit
def _query_tile(
    dq, q, grad, shift, log2_sum, delta, k_base, v_base, stride_kn, stride_vn, first_row, first_key, inputs, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the keys ``first_key`` … ``first_key + BLOCK_N - 1`` to dQ."""
    k = load_rows(k_base, first_key, inputs.seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK, MASKED)
    v = load_rows(v_base, first_key, inputs.seqlen_k, stride_vn, BLOCK_N, VALUE_DIM, WIDTH_V, MASKED)
    keep = True
    if DROPOUT:
        keep = dropout_keep(dropout, first_row, first_key, BLOCK_M, BLOCK_N, BIAS)

    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    grad_products = tl.dot(grad, tl.trans(v), input_precision="ieee")
    _p, _grad_bias, ds = score_gradients(
        products, grad_products, keep, shift[:, None], log2_sum[:, None], delta[:, None],
        (first_row + tl.arange(0, BLOCK_M))[:, None], (first_key + tl.arange(0, BLOCK_N))[None, :],
        inputs, dropout, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED,
    )  # fmt: skip
    if MASKED:  # 0 * NaN is NaN: zero keys with NaN, because rows that see such a key already have NaN in dS
        k = tl.where(is_finite(k), k, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_query_kernel(
    grad_out, query, key, value, row_shift, row_log2_sum, delta, grad_query,
    bias, alibi_slopes, dropout_seed, ranges, tiles, cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_dqb, stride_dqh, stride_dqm,
    stride_lb, stride_lh, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h, stride_tiles_b, stride_tiles_h, num_listed,
    num_heads, group_size, max_seqlen_q, max_seqlen_k, total_q, total_k,
    scale, window_left, window_right, softcap, dropout_threshold, dropout_factor,
    query_offset, dropout_row, dropout_key, dropout_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Computes dQ of BLOCK_M rows. Grid: (query tiles * B * Hq), the last rows first, as in the forward kernel."""
    num_m_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    first_row = (num_m_tiles - 1 - tl.program_id(0) % num_m_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // num_m_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // group_size
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    begin_k, seqlen_k = sequence_range(cu_seqlens_k, batch, total_k, max_seqlen_k)
    if first_row >= seqlen_q:
        return
    begin_row, begin_key = tl.cast(begin_q, tl.int64), tl.cast(begin_k, tl.int64)
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    offset = query_offset if PLACED else seqlen_k - seqlen_q

    k_base = key + batch * stride_kb + kv_head * stride_kh + begin_key * stride_kn
    v_base = value + batch * stride_vb + kv_head * stride_vh + begin_key * stride_vn
    q_base = query + batch * stride_qb + head * stride_qh + begin_row * stride_qm
    g_base = grad_out + batch * stride_gb + head * stride_gh + begin_row * stride_gm
    q = load_rows(q_base, first_row, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK)
    grad = load_rows(g_base, first_row, seqlen_q, stride_gm, BLOCK_M, VALUE_DIM, WIDTH_V)
    row = first_row + tl.arange(0, BLOCK_M)
    position = batch * stride_lb + head * stride_lh + begin_row + row
    shift = tl.load(row_shift + position, mask=row < seqlen_q, other=INF)
    delta_tile = tl.load(delta + position, mask=row < seqlen_q, other=0.0)
    log2_sum = delta_tile
    slope = 0.0
    seed = 0
    if RANGES > 0:
        ranges += batch * stride_ranges_b + head * stride_ranges_h + begin_row * (2 * RANGES)
    if BIAS != NO_BIAS:
        bias += batch * stride_bias_b + head * stride_bias_h
    if BIAS == ADDITIVE_BIAS:
        log2_sum = tl.load(row_log2_sum + position, mask=row < seqlen_q, other=0.0)
    if ALIBI:
        slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
    if DROPOUT:
        seed = tl.load(dropout_seed)
    inputs = ScoreInputs(
        slope, ranges, bias, stride_bias_m, stride_bias_n, offset, seqlen_q, seqlen_k, window_left, window_right,
        scale, softcap,
    )  # fmt: skip
    dropout = DropoutInputs(
        seed, dropout_threshold, dropout_factor, dropout_head + batch_head, dropout_row, dropout_key
    )
    dq = tl.zeros([BLOCK_M, WIDTH_QK], tl.float32)

    begin, full_begin, full_end, end, listed = tiles_of_rows(
        tiles, batch, head, stride_tiles_b, stride_tiles_h, num_listed, begin_q, cu_seqlens_q, first_row, last_row,
        offset, window_left, window_right, seqlen_k, BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES,
    )  # fmt: skip
    num_complete = seqlen_k // BLOCK_N
    if BIAS != NO_BIAS:
        full_begin = end
        full_end = end
    num_masked = full_begin - begin + end - full_end  # tiles on either side of the full ones
    for MASKED in tl.static_range(0 if BIAS == NO_BIAS else 1, 2):
        for step in range(0 if MASKED else full_begin, num_masked if MASKED else full_end):
            if MASKED:
                tile = masked_tile(step, begin, full_begin, full_end, listed, RANGES)
            else:
                tile = full_tile(step, num_complete, listed, RANGES)
            dq = _query_tile(
                dq, q, grad, shift, log2_sum, delta_tile, k_base, v_base, stride_kn, stride_vn, first_row,
                tile * BLOCK_N, inputs, dropout, HEAD_DIM, VALUE_DIM, WIDTH_QK, WIDTH_V,
                BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, DROPOUT, MASKED,
            )  # fmt: skip

    dq_base = grad_query + batch * stride_dqb + head * stride_dqh + begin_row * stride_dqm
    finish_rows(dq_base, dq * scale, first_row, seqlen_q, stride_dqm, BLOCK_M, HEAD_DIM, WIDTH_QK, ADDS)
