"""The gradients of a block of attention whose softmax runs over more keys than the block has.

Attention over a sequence that is spread over GPUs runs block by block. The results of the blocks are merged by their
lse, and each block's gradients then need the output and the lse of the whole (Liu et al., "Ring attention", 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import run
from fastattn.dispatch.choose import choose
from fastattn.functional.attend import is_deterministic
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.attention_checks import Options, check_call
from fastattn.functional.checked_once import CheckedOnce
from fastattn.ops.attention import AttentionBackwardArguments


class Packed(NamedTuple):
    """The offsets and longest lengths of packed sequences, as ``attention_varlen`` takes them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


_checked_calls = CheckedOnce(check_call)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    packed: Packed | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value; ``out``, ``lse`` and their gradients are those of all blocks.

    Layouts and options are those of ``fastattn.attention``, or of ``attention_varlen`` with ``packed``.
    """
    max_seqlens = (0, 0) if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k)
    cu_seqlens_q, cu_seqlens_k = (None, None) if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
    with torch.enable_grad():
        inputs = (query.detach(), key.detach(), value.detach())
        for tensor in inputs:
            tensor.requires_grad_()
        checked = _checked_calls.get(
            (*inputs, None, alibi_slopes, None, cu_seqlens_q, cu_seqlens_k, None),
            Options(*max_seqlens, False, window, softcap, dropout_p, scale),
        )
        choice = choose(checked.call)
        if choice.backend == "torch":
            options = {
                "window": window,
                "softcap": softcap,
                "alibi_slopes": alibi_slopes,
                "dropout_p": dropout_p,
                "dropout_seed": dropout_seed,
                "scale": scale,
                "deterministic": deterministic,
            }
            if packed is None:
                block_out, block_lse = attention(*inputs, return_lse=True, **options)  # type: ignore[call-overload]
            else:
                block_out, block_lse = attention_varlen(*inputs, *packed, return_lse=True, **options)  # type: ignore[call-overload]
            grad_query, grad_key, grad_value = through_the_block(
                grad_out, grad_lse, inputs, out, lse, block_out, block_lse
            )
            return grad_query, grad_key, grad_value
    slopes = None if alibi_slopes is None else torch.atleast_2d(alibi_slopes.detach().float())
    arguments = AttentionBackwardArguments(
        grad_out=grad_out,
        grad_lse=grad_lse,
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        out=out.detach(),
        lse=lse.detach(),
        bias=None,
        alibi_slopes=slopes,
        sinks=None,
        dropout_seed=dropout_seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=checked.max_seqlens[0],
        max_seqlen_k=checked.max_seqlens[1],
        scale=checked.scale,
        window_left=checked.window[0],
        window_right=checked.window[1],
        first_row=None,
        first_key=0,
        first_head=0,
        softcap=checked.softcap,
        dropout_p=checked.dropout_p,
        deterministic=is_deterministic(deterministic),
        bias_grad=False,
        slopes_grad=False,
    )
    return run.attention_backward(choice, arguments)


def through_the_block(
    grad_out: Tensor,
    grad_of_lse: Tensor | None,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    block_out: Tensor,
    block_lse: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradients of ``inputs`` by autograd through the block's own output and lse.

    A row of the block has the share ``w = exp(block_lse - lse)`` in the whole. So the gradient of the block's scores is
    ``w P (dP - rowsum(dO * O) + dlse)``, with the block's own P. Autograd gives ``P (g V^T - rowsum(g * block_out))``
    for a gradient ``g`` of the block's output, and ``P h`` for a gradient ``h`` of its lse. Their sum is the gradient
    above for ``g = w dO`` and ``h = w (rowsum(dO * block_out) - rowsum(dO * O) + dlse)``.
    """
    is_packed = grad_out.dim() == 3

    def row_sum(result: Tensor) -> Tensor:
        rows = (grad_out.to(lse.dtype) * result.detach().to(lse.dtype)).sum(-1)
        return rows.transpose(0, 1) if is_packed else rows

    with torch.no_grad():
        share = (block_lse - lse).exp().masked_fill(block_lse == -math.inf, 0.0)
        of_scores = row_sum(block_out) - row_sum(out)
        grad_lse = share * (of_scores if grad_of_lse is None else of_scores + grad_of_lse.to(lse.dtype))
        of_rows = share.transpose(0, 1) if is_packed else share
        grad_block_out = of_rows[..., None] * grad_out.to(lse.dtype)
    grads = torch.autograd.grad(
        (block_out, block_lse), inputs, (grad_block_out.to(block_out.dtype), grad_lse), allow_unused=True
    )
    return tuple(torch.zeros_like(tensor) if grad is None else grad for grad, tensor in zip(grads, inputs, strict=True))
