"""Computes the gradients of a block of attention: a part of the keys over which the softmax runs.

Attention over a sequence that is distributed over GPUs runs block by block. The outputs of the blocks are merged with
the help of the lse. A block's gradients need the merged output and the merged lse (Liu et al., "Ring attention", 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import run
from fastattn.call import AttentionCall
from fastattn.dispatch.choose import choose
from fastattn.functional.attention import attend
from fastattn.functional.attention_checks import check_once
from fastattn.ops.attention import AttentionBackward, is_deterministic


class Packed(NamedTuple):
    """Holds the offsets and longest lengths of packed sequences, as ``attention_varlen`` takes them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def attention_backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    by_kernel_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns a block's gradients of query, key and value. ``call`` is the block; ``out``, ``lse`` and their gradients
    are merged over all blocks.

    With ``by_kernel_only``, returns None if no kernel supports the call.
    """
    with torch.enable_grad():
        inputs = tuple(tensor.detach().requires_grad_() for tensor in call[:3])
        call, request = check_once(call.with_tensors(inputs))
        choice = choose(request)
        if choice.backend == "torch":
            if by_kernel_only:
                return None
            block_out, block_lse = attend(call._replace(return_lse=True))
            grad_query, grad_key, grad_value = through_the_block(
                grad_out, grad_lse, inputs, out, lse, block_out, block_lse
            )
            return grad_query, grad_key, grad_value
    with torch.no_grad():
        backward = AttentionBackward(call, grad_out, grad_lse, out, lse, is_deterministic(call))
        return run.attention_backward(choice, backward)


def through_the_block(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    block_out: Tensor,
    block_lse: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradients of ``inputs`` by autograd through the block's own output and lse.

    ``O``, ``lse`` and their gradients ``dO`` and ``dlse`` are merged over all blocks; ``P`` is the block's own softmax.
    A row of the block has the weight ``w = exp(block_lse - lse)`` in the merged output. The gradient of the block's
    scores is ``w P (dP - rowsum(dO * O) + dlse)``. Autograd gives ``P (g V^T - rowsum(g * block_out))`` for a gradient
    ``g`` of the block's output, and ``P h`` for a gradient ``h`` of its lse. The sum of these two is the gradient above
    if ``g = w dO`` and ``h = w (rowsum(dO * block_out) - rowsum(dO * O) + dlse)``.
    """
    is_packed = grad_out.dim() == 3

    def row_sum(result: Tensor) -> Tensor:
        rows = (grad_out.to(lse.dtype) * result.detach().to(lse.dtype)).sum(-1)
        return rows.transpose(0, 1) if is_packed else rows

    with torch.no_grad():
        weight = (block_lse - lse).exp().masked_fill(block_lse == -math.inf, 0.0)
        grad_block_lse = row_sum(block_out) - row_sum(out)
        if grad_lse is not None:
            grad_block_lse = grad_block_lse + grad_lse.to(lse.dtype)
        row_weight = weight.transpose(0, 1) if is_packed else weight
        grad_block_out = row_weight[..., None] * grad_out.to(lse.dtype)
    gradients = grad_block_out.to(block_out.dtype), weight * grad_block_lse
    grads = torch.autograd.grad((block_out, block_lse), inputs, gradients, allow_unused=True)
    return tuple(torch.zeros_like(tensor) if grad is None else grad for grad, tensor in zip(grads, inputs, strict=True))
