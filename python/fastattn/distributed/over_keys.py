"""Attends over the keys of all ranks of a group, by "ring" or "allgather", as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.distributed import gathering, ring
from fastattn.distributed.blocks import AnySpread
from fastattn.distributed.local_attention import Inputs, gradient_of_sinks, no_results, with_sinks, zeros_of_sums
from fastattn.functional.attention_block import BackwardTensors


def attend_over_keys(
    inputs: Inputs, spread: AnySpread, group: dist.ProcessGroup, strategy: str
) -> tuple[Tensor, Tensor]:
    """Returns output and lse of this rank's rows, differentiable in all tensors."""
    function, module = _STRATEGIES[strategy]
    return function.apply(*inputs, spread, group, module)


class _AttentionOverKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Takes the fields of `Inputs`, the spread, the group and the module of the strategy."""
        query, key, value, slopes, sinks, local, spread, group, strategy = arguments
        out, lse = no_results(query, value)
        strategy.attend_to_keys(local.with_options(alibi_slopes=slopes), (query, key, value), spread, group, (out, lse))
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, slopes, sinks, out, lse)
        ctx.local, ctx.spread, ctx.group, ctx.strategy = local, spread, group, strategy
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, sinks, out, lse = ctx.saved_tensors
        attention = ctx.local.with_options(alibi_slopes=slopes)
        query_sum = zeros_of_sums(query, lse.dtype)
        slopes_sum = torch.zeros_like(slopes, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        tensors = BackwardTensors(grad_out, grad_lse, query, key, value, out, lse)
        grad_key, grad_value = ctx.strategy.gradients_of_keys(
            attention, tensors, ctx.spread, ctx.group, (query_sum, slopes_sum)
        )
        grad_slopes = None if slopes_sum is None else slopes_sum.to(slopes.dtype)
        grad_sinks = gradient_of_sinks(sinks, grad_out, grad_lse, out, lse)
        return query_sum.to(query.dtype), grad_key, grad_value, grad_slopes, grad_sinks, None, None, None, None


class _RingAttention(_AttentionOverKeys):
    """Gives the strategy "ring" its own name in profiles."""


class _GatheredAttention(_AttentionOverKeys):
    """Gives the strategy "allgather" its own name in profiles."""


# Each module has ``attend_to_keys``, which fills in the results, and ``gradients_of_keys``.
_STRATEGIES = {"ring": (_RingAttention, ring), "allgather": (_GatheredAttention, gathering)}
