"""Defines the operators ``merge_attention``, ``merge_attention_backward`` and, in place, ``merge_attention_into``.

Only Triton has kernels for them, so their schemas are in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.dispatch.recording import is_recording, note
from fastattn.ops.registration import apply, fold_into_heads, register, unfold_heads


class Merge(NamedTuple):
    """Holds a call of ``merge_attention``, as ``fastattn.distributed.merge_attention`` documents it."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor


class MergeInto(NamedTuple):
    """Holds a call of ``merge_attention_into``: the totals, which change in place, and the results of a block."""

    out: Tensor
    lse: Tensor
    block_out: Tensor
    block_lse: Tensor


def differentiable_merge(backend: str, merge: Merge) -> tuple[Tensor, Tensor]:
    """Returns output and lse in float32, differentiable in all arguments."""
    return apply(_Merge, backend, *merge)


class _Merge(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention.run(backend, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, *arguments = inputs
        ctx.save_for_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        arguments = grad_out, grad_lse, *ctx.saved_tensors
        grads = merge_attention_backward.run_in_backward(ctx.backend, arguments)
        if is_recording():
            note("merge backward", ctx.backend, "merge_attention_backward.merge_attention_backward_kernel")
        return None, *grads


def _fake(given: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given.out_a, dtype=torch.float32), torch.empty_like(given.lse_a, dtype=torch.float32)


def _fake_backward(given: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in (given.out_a, given.lse_a, given.out_b, given.lse_b))


# --- vmap: the mapped dimension is folded into the heads ------------------------------------------------------------


def _vmap(*results: str) -> Callable[..., Any]:
    """Returns a vmap rule that folds the mapped dimension into the heads.

    ``results`` names for each result an argument that has the same dimensions.
    """

    def rule(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
        is_packed = given.out_a.dim() - (dims.out_a is not None) == 3
        heads_dim = {name: 0 if is_packed and "lse" in name else 1 for name in given._fields}
        folded = [
            fold_into_heads(tensor, dim, size, heads)
            for tensor, dim, heads in zip(given, dims, heads_dim.values(), strict=True)
        ]
        found = zip(overload(*folded), results, strict=True)
        return tuple(unfold_heads(result, size, heads_dim[name]) for result, name in found), (0,) * len(results)

    return rule


# Returns output and lse in float32, not differentiable.
merge_attention = register(
    "merge_attention",
    Merge,
    triton_module="merge_attention",
    schema="(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    fake=_fake,
    vmap=_vmap("out_a", "lse_a"),
)
# Takes the gradients of the results and the forward pass's arguments, and returns the gradients of these arguments.
merge_attention_backward = register(
    "merge_attention_backward",
    None,
    triton_module="merge_attention_backward",
    schema="(Tensor grad_out, Tensor grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> "
    "(Tensor grad_out_a, Tensor grad_lse_a, Tensor grad_out_b, Tensor grad_lse_b)",
    fake=_fake_backward,
    vmap=_vmap("out_a", "lse_a", "out_b", "lse_b"),
)
# Merges the block into ``out`` and ``lse`` in place; not differentiable.
merge_attention_into = register(
    "merge_attention_into",
    MergeInto,
    triton_module="merge_attention",
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor block_out, Tensor block_lse) -> ()",
)
