"""Merges the splits of flash-decoding.

    lse = log(exp(sink) + sum over splits of exp(lse_split))
    out = sum over splits of exp(lse_split - lse) out_split

There is one CTA per row of the output. Splits without keys have lse -inf, and their output is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The partial results that the combine kernel reads at a time: [16, 128] fp32 are 16 vector loads per thread of a warp.
COMBINE_SPLITS = 16


@triton.jit
def finish_row(acc, row_max, row_sum, sink, HAS_SINK: tl.constexpr):
    """Returns the normalised output and log-sum-exp of rows; a sink adds only to the denominator.

    ``acc`` has one dim more than ``row_max``, ``row_sum`` and ``sink``. A row without keys gets 0 and -inf (or the
    sink).
    """
    if HAS_SINK:
        peak = tl.maximum(row_max, sink)
        peak_safe = tl.where(peak == float("-inf"), 0.0, peak)
        rescale = tl.exp(row_max - peak_safe)
        row_sum = row_sum * rescale + tl.exp(sink - peak_safe)
        acc = acc * tl.expand_dims(rescale, -1)
        row_max = peak
    out = acc / tl.expand_dims(tl.where(row_sum == 0.0, 1.0, row_sum), -1)
    return out, row_max + tl.log(row_sum)


@triton.jit(do_not_specialize=["num_splits", "num_rows", "num_heads", "num_queries"])
def combine_kernel(
    partial_out, partial_lse,  # [num_splits, B, Hq, Sq, Dv] and [num_splits, B, Hq, Sq], fp32
    sinks,  # [Hq] fp32, or None
    out, out_strides,  # [B, Hq, Sq, Dv], with the strides of batch, head and query
    lse,  # [B, Hq, Sq] fp32
    num_splits, num_rows, num_heads, num_queries,  # num_rows = B * Hq * Sq
    VALUE_DIM: tl.constexpr, DV_PAD: tl.constexpr, HAS_SINK: tl.constexpr, COMBINE_SPLITS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    query_idx = (pid % num_queries).to(tl.int64)
    head_idx = (pid // num_queries % num_heads).to(tl.int64)
    batch_idx = (pid // (num_queries * num_heads)).to(tl.int64)
    row = pid.to(tl.int64)
    value_dim = tl.arange(0, DV_PAD)

    row_max = tl.full([1], float("-inf"), tl.float32)
    for first_split in range(0, num_splits, COMBINE_SPLITS):
        split = first_split + tl.arange(0, COMBINE_SPLITS)
        split_lse = tl.load(partial_lse + split * num_rows + row, mask=split < num_splits, other=float("-inf"))
        row_max = tl.maximum(row_max, tl.max(split_lse, axis=0))
    max_safe = tl.where(row_max == float("-inf"), 0.0, row_max)

    # Splits are added in order, in groups of constant size. So the order of the sum, and its bits, do not depend on
    # num_splits as long as the further splits are empty.
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DV_PAD], tl.float32)
    for first_split in range(0, num_splits, COMBINE_SPLITS):
        split = first_split + tl.arange(0, COMBINE_SPLITS)
        split_row = split * num_rows + row
        split_lse = tl.load(partial_lse + split_row, mask=split < num_splits, other=float("-inf"))
        mask = (split_lse != float("-inf"))[:, None] & (value_dim < VALUE_DIM)[None, :]
        o = tl.load(partial_out + split_row[:, None] * VALUE_DIM + value_dim[None, :], mask=mask, other=0.0)
        weight = tl.exp(split_lse - max_safe)
        row_sum += tl.sum(weight, axis=0)
        acc += tl.sum(weight[:, None] * o, axis=0)[None, :]

    sink = row_max
    if HAS_SINK:
        sink = tl.load(sinks + head_idx + tl.zeros([1], tl.int32))
    out_row, row_lse = finish_row(acc, row_max, row_sum, sink, HAS_SINK)
    tl.store(lse + row + tl.zeros([1], tl.int32), row_lse)
    out_ptr = out + batch_idx * out_strides[0] + head_idx * out_strides[1] + query_idx * out_strides[2]
    tl.store(out_ptr + value_dim[None, :], out_row.to(out.dtype.element_ty), mask=(value_dim < VALUE_DIM)[None, :])
