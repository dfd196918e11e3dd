"""Computes the gradients of all inputs of attention, without atomics, so that the same inputs give the same bits.

    P  = exp(S - lse)             recomputed tile by tile, nothing of O(Sq * Sk) is stored
    dV = dropout(P)^T dO
    dP = dropout(dO V^T)
    dS = P (dP - delta),          delta = rowsum(dO * O) - dlse, once per row
    dQ = scale * dS K,  dK = scale * dS^T Q,  dbias = dS,  dslope = sum of -dS * distance

Five kernels compute delta (`attention_backward_rows`), dQ (`attention_backward_query`), dK and dV
(`attention_backward_key_value`), the bias's gradient (`attention_backward_bias`), and the gradient of ALiBi slopes
(`attention_backward_slopes`). Computing S and dP for dQ, and again for dK and dV, costs two of seven products. In
return dQ needs no atomics and no fp32 workspace.
Source: Dao, "FlashAttention-2", 2023, algorithm 2, split so that one CTA makes each sum, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.dispatch.device import kernel_facts
from fastattn.layout import contiguous, empty_like_heads, readable
from fastattn.triton_kernels.attention_backward_bias import attention_backward_bias_kernel
from fastattn.triton_kernels.attention_backward_key_value import attention_backward_key_value_kernel
from fastattn.triton_kernels.attention_backward_query import attention_backward_query_kernel
from fastattn.triton_kernels.attention_backward_rows import attention_backward_rows_kernel
from fastattn.triton_kernels.attention_backward_slopes import attention_backward_slopes_kernel, slopes_splits
from fastattn.triton_kernels.attention_launch import (
    Arguments,
    Scores,
    attention_constexprs,
    broadcast_strides,
    is_crowded,
    launch,
    lse_strides,
    strides,
)
from fastattn.triton_kernels.attention_ranges import list_tiles
from fastattn.triton_kernels.tiles import BackwardKernel, attention_backward_tile, ceil_div


def attention_backward(given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernels of the op ``attention_backward``; ``given`` holds its arguments by name (csrc/bindings.cpp),
    which the caller has checked.

    Shapes are those of `attention_forward`; grad_out is like out, grad_lse like lse. Returns (grad_query, grad_key,
    grad_value, in the dtype and order of dims of their tensors; grad_bias fp32 in the bias's shape, or ``[0]`` unless
    ``bias_grad``; grad_sinks fp32 ``[Hq]``, or ``[0]``; grad_slopes fp32 in the slopes' shape, or ``[0]`` unless
    ``slopes_grad``). Every kernel is always deterministic.
    """
    inputs = given.query, given.key, given.value
    if given.cu_seqlens_q is not None:
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs]
    else:
        grads = [empty_like_heads(t, t.shape[-1]) for t in inputs]
    of_options = _gradients(grads, False, given)
    return grads[0], grads[1], grads[2], *of_options


def attention_backward_add(given: Any) -> Tensor:
    """Launches the kernels of the op ``attention_backward_add``, which adds the gradients of query, key and value to
    the given fp32 ones. Returns grad_slopes, or ``[0]`` unless ``slopes_grad``."""
    _, _, grad_slopes = _gradients([given.grad_query, given.grad_key, given.grad_value], True, given)
    return grad_slopes


def _gradients(grads: Sequence[Tensor], adds: bool, given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the gradients of query, key and value into ``grads``, or adds them to ``grads``. Returns the
    gradients of bias, sinks and slopes."""
    scores = Scores(given)
    query, key, bias, sinks = given.query, given.key, scores.bias, scores.sinks
    num_heads, head_dim, value_dim = query.shape[1], query.shape[-1], given.value.shape[-1]
    batch, (max_seqlen_q, max_seqlen_k) = scores.batch, scores.longest
    grad_query, grad_key, grad_value = grads
    additive = bias is not None and bias.is_floating_point()
    wanted_bias = bias if bias is not None and given.bias_grad else None
    grad_bias = query.new_zeros((0,) if wanted_bias is None else wanted_bias.shape, dtype=torch.float32)

    grad_out, out, lse = readable(given.grad_out), readable(given.out), given.lse.contiguous()
    delta, row_shift = torch.empty_like(lse), torch.empty_like(lse)
    options = scores.options()
    arguments: Arguments = {
        **scores.arguments(),
        "ADDS": adds,
        "grad_out": grad_out,
        "output": out,
        "lse": lse,
        "grad_lse": contiguous(given.grad_lse),
        "GRAD_LSE": given.grad_lse is not None,
        "delta": delta,
        "row_shift": row_shift,
        "row_log2_sum": torch.empty_like(lse) if additive else None,
        "grad_query": grad_query,
        "grad_key": grad_key,
        "grad_value": grad_value,
        "grad_bias": grad_bias,
        **strides("g", grad_out),
        **strides("o", out),
        **strides("dq", grad_query),
        **strides("dk", grad_key),
        **strides("dv", grad_value),
        **lse_strides(lse),
        **broadcast_strides("dbias", None if wanted_bias is None else grad_bias),
        "num_batches": batch,
    }
    arch = kernel_facts(query.device).arch

    def with_tile(kernel: BackwardKernel) -> Arguments:
        tile = attention_backward_tile(arch, head_dim, value_dim, kernel, is_crowded(options))
        return {**arguments, **attention_constexprs(tile, head_dim, value_dim, **options)}

    if lse.numel() > 0:
        complete = with_tile("query")
        num_programs = ceil_div(max_seqlen_q, complete["BLOCK_M"]) * batch * num_heads
        launch(attention_backward_rows_kernel, num_programs, complete)
        of_rows = {**complete, **list_tiles(complete)}
        launch(attention_backward_query_kernel, num_programs, of_rows)
    if num_heads == 0:  # keys and values may still have heads
        if not adds:
            grad_key.zero_()
            grad_value.zero_()
    elif key.numel() > 0:
        complete = with_tile("key_value")
        num_programs = ceil_div(max_seqlen_k, complete["BLOCK_N"]) * batch * key.shape[1]
        launch(attention_backward_key_value_kernel, num_programs, {**complete, **list_tiles(complete, of_keys=True)})
    if wanted_bias is not None and lse.numel() > 0:
        complete = with_tile("bias")
        tiles = ceil_div(max_seqlen_q, complete["BLOCK_M"]), ceil_div(max_seqlen_k, complete["BLOCK_N"])
        sums = [size == 1 for size in wanted_bias.shape]
        factors = zip(sums, (batch, num_heads, *tiles), strict=True)
        num_programs = math.prod(1 if is_sum else count for is_sum, count in factors)
        complete |= zip(("SUM_BATCHES", "SUM_HEADS", "SUM_ROWS", "SUM_COLUMNS"), sums, strict=True)
        launch(attention_backward_bias_kernel, num_programs, complete)

    grad_sinks = query.new_zeros((0,) if sinks is None else sinks.shape, dtype=torch.float32)
    if sinks is not None and lse.numel() > 0:
        # A sink has no value, so dS = P (0 - delta). lse = -inf marks rows that see nothing, not even the sink.
        head_last = (lse if lse.dim() == 3 else lse[None]).transpose(1, 2)  # [B, S, Hq]
        delta_last = (delta if delta.dim() == 3 else delta[None]).transpose(1, 2)
        grad = (sinks - head_last).exp() * -delta_last
        grad_sinks = torch.where(head_last == -torch.inf, 0.0, grad).sum((0, 1))

    slopes = given.alibi_slopes if given.slopes_grad else None
    grad_slopes = query.new_zeros((0,) if slopes is None else slopes.shape, dtype=torch.float32)
    if slopes is not None and lse.numel() > 0:
        splits = slopes_splits(batch * num_heads, ceil_div(max_seqlen_q, of_rows["BLOCK_M"]))
        partials = query.new_empty((batch, num_heads, splits), dtype=torch.float32)
        complete = {**of_rows, "slope_sums": partials, "num_splits": splits}
        launch(attention_backward_slopes_kernel, partials.numel(), complete)
        grad_slopes = partials.sum((0, 2))[None] if slopes.shape[0] == 1 else partials.sum(2)
    return grad_bias, grad_sinks, grad_slopes
