"""Computes two terms per query row for attention's backward: delta = rowsum(dO * O) - dlse, and the normaliser of P.

P = exp(S - lse) loses its normalisation where lse is huge: with every visible key at finfo.min, finfo.min + log(n)
rounds to finfo.min, and P would be 1 instead of 1 / n. Only an additive bias makes such scores. Such rows get their
maximum and the logarithm of their sum separately, from one more pass over their keys. Tiles without such rows skip that
pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    LOG2_E,
    NOT_SPECIALIZED,
    ScoreInputs,
    attention_scores,
    load_rows,
    sequence_range,
    tile_range,
)

# At an lse of 1024, half an fp32 ulp is 6e-5. As a relative error of P, this is an eighth of fp16's rounding.
LARGE_LSE = tl.constexpr(1024.0)


@triton.jit
def _renormalise(
    q_base, stride_qm, k_base, stride_kn, first_row, last_row, sink, inputs,
    HEAD_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, RANGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Returns each row's largest score, and log2 of its sum of exp(score - largest), as in the forward pass."""
    q = load_rows(q_base, first_row, inputs.seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, WIDTH_QK)
    row = first_row + tl.arange(0, BLOCK_M)[:, None]
    row_max = tl.zeros([BLOCK_M], tl.float32) + sink
    row_sum = tl.zeros([BLOCK_M], tl.float32) + tl.where(sink == -INF, 0.0, 1.0)
    begin, _full_begin, _full_end, end = tile_range(
        first_row, last_row, inputs.offset, inputs.window_left, inputs.window_right, inputs.seqlen_k, BLOCK_N, LEFT,
        RIGHT,
    )  # fmt: skip
    for tile in range(begin, end):
        k = load_rows(k_base, tile * BLOCK_N, inputs.seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, WIDTH_QK)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        scores, _visible, _slope_of_cap = attention_scores(
            tl.dot(q, tl.trans(k), input_precision="ieee"), row, column, inputs,
            LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS, MASKED=True,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == -INF, 0.0, new_max)
        p = tl.exp2((scores - shift[:, None]) * LOG2_E)
        row_sum = row_sum * tl.exp2((row_max - shift) * LOG2_E) + tl.sum(p, 1)
        row_max = new_max
    return row_max, tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_rows_kernel(
    grad_out, output, query, key, lse, grad_lse, delta, row_shift, row_log2_sum, bias, alibi_slopes, sinks, ranges,
    cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gh, stride_gm, stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_lb, stride_lh,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slope_b,
    stride_ranges_b, stride_ranges_h, num_heads, group_size, max_seqlen_q, max_seqlen_k, total_q, total_k,
    scale, window_left, window_right, softcap, query_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH_QK: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    SINKS: tl.constexpr, GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """Computes delta, row_shift and, with an additive bias, row_log2_sum. Grid: (query tiles * B * Hq)."""
    num_m_tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    first_row = (tl.program_id(0) % num_m_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // num_m_tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    if first_row >= seqlen_q:
        return
    begin_row = tl.cast(begin_q, tl.int64)
    g_base = grad_out + batch * stride_gb + head * stride_gh + begin_row * stride_gm
    o_base = output + batch * stride_ob + head * stride_oh + begin_row * stride_om
    grad = load_rows(g_base, first_row, seqlen_q, stride_gm, BLOCK_M, VALUE_DIM, WIDTH_V)
    out = load_rows(o_base, first_row, seqlen_q, stride_om, BLOCK_M, VALUE_DIM, WIDTH_V)
    delta_tile = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)

    row = first_row + tl.arange(0, BLOCK_M)
    inside = row < seqlen_q
    position = batch * stride_lb + head * stride_lh + begin_row + row  # in all tensors that are laid out like lse
    if GRAD_LSE:
        delta_tile -= tl.load(grad_lse + position, mask=inside, other=0.0)
    tl.store(delta + position, delta_tile, mask=inside)

    # A row that sees nothing gets the shift +inf, with which every probability is exp(-inf) = 0.
    lse_tile = tl.load(lse + position, mask=inside, other=0.0)
    shift = tl.where(lse_tile == -INF, INF, lse_tile)
    if BIAS == ADDITIVE_BIAS:
        log2_sum = tl.zeros([BLOCK_M], tl.float32)
        large = (tl.abs(shift) > LARGE_LSE) & (shift != INF)
        if tl.max(large.to(tl.int32), 0) > 0:
            begin_k, seqlen_k = sequence_range(cu_seqlens_k, batch, total_k, max_seqlen_k)
            if RANGES > 0:
                ranges += batch * stride_ranges_b + head * stride_ranges_h + begin_row * (2 * RANGES)
            slope = 0.0
            sink = -INF
            if ALIBI:
                slope = tl.load(alibi_slopes + batch * stride_slope_b + head)
            if SINKS:
                sink = tl.load(sinks + head)
            inputs = ScoreInputs(
                slope, ranges, bias + batch * stride_bias_b + head * stride_bias_h, stride_bias_m, stride_bias_n,
                query_offset if PLACED else seqlen_k - seqlen_q, seqlen_q, seqlen_k, window_left, window_right,
                scale, softcap,
            )  # fmt: skip
            row_max, log2_of_sum = _renormalise(
                query + batch * stride_qb + head * stride_qh + begin_row * stride_qm, stride_qm,
                key + batch * stride_kb + (head // group_size) * stride_kh + tl.cast(begin_k, tl.int64) * stride_kn,
                stride_kn, first_row, tl.minimum(first_row + BLOCK_M, seqlen_q) - 1, sink, inputs,
                HEAD_DIM, WIDTH_QK, BLOCK_M, BLOCK_N, LEFT, RIGHT, RANGES, SOFTCAP, ALIBI, BIAS,
            )  # fmt: skip
            shift = tl.where(large, row_max, shift)
            log2_sum = tl.where(large, log2_of_sum, 0.0)
        tl.store(row_log2_sum + position, log2_sum, mask=inside)
    else:
        shift *= LOG2_E
    tl.store(row_shift + position, shift, mask=inside)
