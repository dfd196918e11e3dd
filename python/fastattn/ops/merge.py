"""The operators ``merge_attention``, ``merge_attention_backward`` and, in place, ``merge_attention_into``.

Only Triton has kernels for them, so their schemas are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.dispatch.recording import is_recording, note
from fastattn.ops.registration import apply, call, call_in_backward, fold_into_heads, register, unfold_heads


class MergeArguments(NamedTuple):
    """The arguments of ``merge_attention``, which are those of ``fastattn.distributed.merge_attention``."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor


class MergeBackwardArguments(NamedTuple):
    """The arguments of ``merge_attention_backward``: the gradients of the results, and the merged tensors."""

    grad_out: Tensor
    grad_lse: Tensor
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor


class MergeIntoArguments(NamedTuple):
    """The arguments of ``merge_attention_into``: the totals, which change in place, and the results of a block."""

    out: Tensor
    lse: Tensor
    block_out: Tensor
    block_lse: Tensor


def merge_attention(backend: str, arguments: MergeArguments) -> tuple[Tensor, Tensor]:
    """Returns output and lse in float32, not differentiable."""
    results: tuple[Tensor, Tensor] = call(backend, "merge_attention", arguments)
    return results


def differentiable_merge(backend: str, arguments: MergeArguments) -> tuple[Tensor, Tensor]:
    """Returns output and lse in float32, differentiable in all arguments."""
    out, lse = apply(_Merge, backend, *arguments)
    return out, lse


def merge_attention_into(backend: str, arguments: MergeIntoArguments) -> None:
    """Merges the block into ``out`` and ``lse`` in place. It is not differentiable."""
    call(backend, "merge_attention_into", arguments)


class _Merge(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention(backend, MergeArguments(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, *arguments = inputs
        ctx.save_for_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        arguments = MergeBackwardArguments(grad_out, grad_lse, *ctx.saved_tensors)
        grads = call_in_backward(ctx.backend, "merge_attention_backward", arguments)
        if is_recording():
            note("merge backward", ctx.backend, "merge_attention_backward.merge_attention_backward_kernel")
        return None, *grads


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    given = MergeArguments(*args)
    return torch.empty_like(given.out_a, dtype=torch.float32), torch.empty_like(given.lse_a, dtype=torch.float32)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    given = MergeBackwardArguments(*args)
    return tuple(torch.empty_like(tensor) for tensor in (given.out_a, given.lse_a, given.out_b, given.lse_b))


def _fake_into(*args: Any) -> None:
    """Returns nothing, like the operator."""


def _flops(*args: Any, **kwargs: Any) -> int:
    return 0


# --- vmap: the mapped dimension joins the heads ---------------------------------------------------------------------


def _vmap(arguments: type[Any], results: Sequence[str]) -> Callable[[torch._ops.OpOverload], Callable[..., Any]]:
    """Makes a rule by which the mapped dimension joins the heads.

    ``results`` names for each result an argument that has the same dimensions.
    """

    def of_overload(overload: torch._ops.OpOverload) -> Callable[..., Any]:
        def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
            given, dims, size = arguments(*args), arguments(*in_dims), info.batch_size
            is_packed = given.out_a.dim() - (dims.out_a is not None) == 3
            heads_dim = {name: 0 if is_packed and "lse" in name else 1 for name in given._fields}
            folded = [
                fold_into_heads(tensor, dim, size, of_heads)
                for tensor, dim, of_heads in zip(given, dims, heads_dim.values(), strict=True)
            ]
            found = zip(overload(*folded), results, strict=True)
            return tuple(unfold_heads(result, size, heads_dim[name]) for result, name in found), (0,) * len(results)

        return rule

    return of_overload


register(
    "merge_attention",
    arguments=MergeArguments,
    triton_module="merge_attention",
    schema="(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    fake=_fake,
    flops=_flops,
    vmap=_vmap(MergeArguments, ("out_a", "lse_a")),
)
register(
    "merge_attention_backward",
    arguments=MergeBackwardArguments,
    triton_module="merge_attention_backward",
    schema="(Tensor grad_out, Tensor grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> "
    "(Tensor grad_out_a, Tensor grad_lse_a, Tensor grad_out_b, Tensor grad_lse_b)",
    fake=_fake_backward,
    flops=_flops,
    vmap=_vmap(MergeBackwardArguments, ("out_a", "lse_a", "out_b", "lse_b")),
)
register(
    "merge_attention_into",
    arguments=MergeIntoArguments,
    triton_module="merge_attention",
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor block_out, Tensor block_lse) -> ()",
    fake=_fake_into,
    flops=_flops,
)
