"""The operators ``attention_forward`` and ``attention_backward``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fastattn import native
from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.recording import is_recording, note
from fastattn.layout import empty_like_heads
from fastattn.ops.flops import attention_backward_flops, attention_flops
from fastattn.ops.registration import (
    apply,
    call,
    call_in_backward,
    fold_into_heads,
    refuse_mapped,
    register,
    unfold_heads,
)

_Options: TypeAlias = tuple[int, int, float, int, int, int | None, int, int, float, float]


class AttentionArguments(NamedTuple):
    """The arguments of ``attention_forward``, dense (``query [B, Hq, Sq, D]``), packed, or over pages.

    Attributes:
        alibi_slopes, sinks: float32, ``[1 or B, Hq]`` and ``[Hq]``.
        window_left, window_right: -1 is unbounded.
        first_row, first_key, first_head: the place of the first row, key and head in a larger call, of which this is a
            block. Windows, ALiBi and dropout go by these places; with dropout ``first_key`` is a multiple of 4. If
            ``first_row`` is None, the last row stands at the last key, and dropout counts rows from 0.
        batch_invariant: whether a sequence's results have the same bits whatever else is in the batch.
        return_max_logit: whether the third result is the largest score of each head, ``[Hq]``, instead of empty.
        exact_out: whether the output is float32, as a merge of blocks needs it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    first_row: int | None = None
    first_key: int = 0
    first_head: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    block_table: Tensor | None = None
    batch_invariant: bool = False
    return_max_logit: bool = False
    exact_out: bool = False

    def options(self) -> _Options:
        """Returns the options that both operators take in the same order."""
        return (
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.scale,
            self.window_left,
            self.window_right,
            self.first_row,
            self.first_key,
            self.first_head,
            self.softcap,
            self.dropout_p,
        )


class AttentionBackwardArguments(NamedTuple):
    """The arguments of ``attention_backward``: the gradients of the results, and the arguments and results of the
    forward pass. ``bias_grad`` and ``slopes_grad`` say whether the gradients of the bias and of the slopes are wanted.
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    first_row: int | None
    first_key: int
    first_head: int
    softcap: float
    dropout_p: float
    deterministic: bool
    bias_grad: bool
    slopes_grad: bool


class AttentionBackwardAddArguments(NamedTuple):
    """The arguments of ``attention_backward_add``: the float32 sums to which the gradients of a block's query, key and
    value are added, and the arguments of ``attention_backward`` that a block may have."""

    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    alibi_slopes: Tensor | None
    dropout_seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    first_row: int | None
    first_key: int
    first_head: int
    softcap: float
    dropout_p: float
    deterministic: bool
    slopes_grad: bool


# The gradients of AttentionArguments, by the same names: None, unless one is given.
_Gradients = cast("Any", namedtuple)(
    "_Gradients", AttentionArguments._fields, defaults=(None,) * len(AttentionArguments._fields)
)


Results: TypeAlias = tuple[Tensor, Tensor, Tensor]  # output, lse, largest scores


def attention_forward(backend: str, arguments: AttentionArguments) -> Results:
    """Returns output, lse and largest scores, not differentiable."""
    results: Results = call(backend, "attention_forward", arguments)
    return results


def differentiable_attention(backend: str, arguments: AttentionArguments, deterministic: bool) -> Results:
    """Returns output, lse and largest scores; the first two are differentiable in query, key, value, bias, slopes and
    sinks."""
    out, lse, max_logit = apply(_Attention, backend, deterministic, *arguments)
    return out, lse, max_logit.detach()  # under vmap it would need gradients


def attention_backward_of_block(backend: str, arguments: AttentionBackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, but of no bias, slopes or sinks. It is not differentiable."""
    with torch.no_grad():
        grad_query, grad_key, grad_value, *_ = call(backend, "attention_backward", arguments)
    if is_recording():
        note("attention backward", backend, backward_kernels(backend, arguments))
    return grad_query, grad_key, grad_value


def add_attention_gradients(backend: str, sums: tuple[Tensor, ...], arguments: AttentionBackwardArguments) -> Tensor:
    """Adds the gradients of query, key and value to ``sums``; returns that of the slopes, or an empty tensor."""
    fields = AttentionBackwardAddArguments._fields[len(sums) :]
    with torch.no_grad():
        grad_slopes: Tensor = call(
            backend, "attention_backward_add", (*sums, *(getattr(arguments, name) for name in fields))
        )
    if is_recording():
        note("attention backward", backend, backward_kernels(backend, arguments))
    return grad_slopes


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # forward and backward are one op each, which has a vmap rule

    @staticmethod
    def forward(backend: str, deterministic: bool, *arguments: Any) -> Results:
        out, lse, max_logit = call(backend, "attention_forward", arguments)
        return out, lse, max_logit

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        ctx.backend, ctx.deterministic, *arguments = inputs
        given = AttentionArguments._make(arguments)
        out, lse, max_logit = output
        ctx.mark_non_differentiable(max_logit)
        ctx.save_for_backward(
            given.query,
            given.key,
            given.value,
            given.bias,
            given.alibi_slopes,
            given.sinks,
            given.dropout_seed,
            given.cu_seqlens_q,
            given.cu_seqlens_k,
            out,
            lse,
        )
        ctx.options = given.options()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max: None) -> tuple[Any, ...]:
        query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return None, None, *_Gradients()
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs_grad = _needs_grad(*ctx.needs_input_grad)
        bias_grad = bias is not None and bool(needs_grad.bias)
        slopes_grad = slopes is not None and bool(needs_grad.alibi_slopes)
        options: _Options = ctx.options
        arguments = AttentionBackwardArguments(
            grad_out,
            grad_lse,
            query,
            key,
            value,
            out,
            lse,
            bias,
            slopes,
            sinks,
            seed,
            cu_seqlens_q,
            cu_seqlens_k,
            *options,
            ctx.deterministic,
            bias_grad,
            slopes_grad,
        )
        grads = call_in_backward(ctx.backend, "attention_backward", arguments)
        if is_recording():
            note("attention backward", ctx.backend, backward_kernels(ctx.backend, arguments))
        grad_query, grad_key, grad_value, grad_bias, grad_sinks, grad_slopes = grads
        gradients = _Gradients(
            grad_query,
            grad_key,
            grad_value,
            bias=grad_bias.to(bias.dtype) if bias_grad else None,
            alibi_slopes=grad_slopes if slopes_grad else None,
            sinks=None if sinks is None else grad_sinks,
        )
        return None, None, *gradients


def _needs_grad(backend: bool, deterministic: bool, *needs_grad: bool) -> AttentionArguments:
    """Returns by name whether autograd needs the gradient of each input of ``_Attention``."""
    return AttentionArguments._make(needs_grad)


def backward_kernels(backend: str, arguments: AttentionBackwardArguments) -> str:
    """Returns the kernels that ``attention_backward`` launches, in order, joined by " + ": their names have commas."""
    if backend == "triton":
        asked_for = [("bias", arguments.bias_grad), ("slopes", arguments.slopes_grad)]
        launched = ["rows", "query", "key_value", *(name for name, wanted in asked_for if wanted)]
        return " + ".join(f"attention_backward_{name}.attention_backward_{name}_kernel" for name in launched)
    query, value = arguments.query, arguments.value
    has_scores_changed = arguments.bias is not None or arguments.alibi_slopes is not None
    facts = kernel_facts(query.device)
    names = native.attention_backward_kernels(
        facts.arch,
        facts.shared_memory_bytes,
        query.shape[-1],
        value.shape[-1],
        query.dtype,
        changes_scores=has_scores_changed or arguments.softcap > 0 or arguments.dropout_p > 0,
        bias_gradient=arguments.bias_grad,
        sinks=arguments.sinks is not None,
        slopes_gradient=arguments.slopes_grad,
    )
    return " + ".join(names)


# --- shapes ---------------------------------------------------------------------------------------------------------


def _fake_forward(*args: Any) -> Results:
    given = AttentionArguments(*args)
    query, value_dim, heads = given.query, given.value.shape[-1], given.query.shape[1]
    max_logit = query.new_empty(heads if given.return_max_logit else 0, dtype=torch.float32)
    dtype = torch.float32 if given.exact_out else query.dtype
    if given.cu_seqlens_q is not None:
        total = query.shape[0]
        lse = query.new_empty(heads, total, dtype=torch.float32)
        return query.new_empty(total, heads, value_dim, dtype=dtype), lse, max_logit
    return empty_like_heads(query, value_dim, dtype), query.new_empty(query.shape[:3], dtype=torch.float32), max_logit


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    given = AttentionBackwardArguments(*args)
    inputs = (given.query, given.key, given.value)
    if given.cu_seqlens_q is not None:
        grads = tuple(t.new_empty(t.shape) for t in inputs)
    else:
        grads = tuple(empty_like_heads(t, t.shape[-1]) for t in inputs)
    bias_shape = given.bias.shape if given.bias_grad and given.bias is not None else (0,)
    sinks_shape = (0,) if given.sinks is None else given.sinks.shape
    slopes_shape = given.alibi_slopes.shape if given.slopes_grad and given.alibi_slopes is not None else (0,)
    of_options = (bias_shape, sinks_shape, slopes_shape)
    return *grads, *(given.query.new_empty(shape, dtype=torch.float32) for shape in of_options)


def _fake_backward_add(*args: Any) -> Tensor:
    given = AttentionBackwardAddArguments(*args)
    shape = given.alibi_slopes.shape if given.slopes_grad and given.alibi_slopes is not None else (0,)
    return given.query.new_empty(shape, dtype=torch.float32)


# --- FLOPs: every pair of query and key counts, masked or not, as for torch's own attention -------------------------


def _pairs(given: AttentionArguments | AttentionBackwardArguments | AttentionBackwardAddArguments) -> int:
    query: Sequence[int] = given.query  # type: ignore[assignment]
    key: Sequence[int] = given.key  # type: ignore[assignment]
    return query[0] * query[1] * (query[2] * key[2] if len(query) == 4 else given.max_seqlen_k)


def _forward_flops(*args: Any, **kwargs: Any) -> int:
    given: Any = AttentionArguments(*args, **kwargs)
    return attention_flops(_pairs(given), given.key[-1], given.value[-1])


def _backward_flops(*args: Any, **kwargs: Any) -> int:
    given: Any = AttentionBackwardArguments(*args, **kwargs)
    return attention_backward_flops(_pairs(given), given.key[-1], given.value[-1])


def _backward_add_flops(*args: Any, **kwargs: Any) -> int:
    given: Any = AttentionBackwardAddArguments(*args, **kwargs)
    return attention_backward_flops(_pairs(given), given.key[-1], given.value[-1])


# --- vmap: the mapped dimension joins the heads ---------------------------------------------------------------------
# Kernels treat all heads alike (``v * Hq + h`` reads KV head ``v * Hkv + h // group``), so a mapped call is one launch.


def _fold_bias(bias: Tensor | None, mapped: int | None, size: int, heads: int) -> Tensor | None:
    """Joins the mapped dimension of a bias with its heads; a bias shared by all heads must first be repeated."""
    if bias is None or (mapped is None and bias.shape[1] == 1):
        return bias
    folded = fold_into_heads(bias, mapped, size, heads_dim=1)
    assert folded is not None
    return folded if _shape_of_one(bias, mapped)[1] == heads else folded.repeat_interleave(heads, dim=1)


def _shape_of_one(tensor: Tensor, mapped: int | None) -> torch.Size:
    """Returns the shape of one sample."""
    return tensor.shape if mapped is None else tensor.movedim(mapped, 0).shape[1:]


# Name → the dimension of the heads in a sample; for the lse, in a dense call.
HEADS_DIM = {"sinks": 0} | dict.fromkeys(
    ("query", "key", "value", "out", "grad_out", "lse", "grad_lse", "alibi_slopes"), 1
)
_PACKED_LSE_HEADS_DIM = 0
_ONE_FOR_ALL_SAMPLES = ("dropout_seed", "cu_seqlens_q", "cu_seqlens_k")


def _folded(given: Any, dims: Any, size: int) -> dict[str, Tensor | None]:
    """Returns the arguments that have heads, with the mapped dimension joined to the heads."""
    packed = given.cu_seqlens_q is not None
    folded = {}
    for name, heads_dim in HEADS_DIM.items():
        if name in given._fields:
            dim = _PACKED_LSE_HEADS_DIM if packed and name in ("lse", "grad_lse") else heads_dim
            folded[name] = fold_into_heads(getattr(given, name), getattr(dims, name), size, dim)
    heads = _shape_of_one(given.query, dims.query)[1]
    return folded | {"bias": _fold_bias(given.bias, dims.bias, size, heads)}


def _vmap_forward(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        given, size = AttentionArguments(*args), info.batch_size
        dims: Any = AttentionArguments(*in_dims)  # type: ignore[arg-type]
        refuse_mapped(dims, *_ONE_FOR_ALL_SAMPLES, "block_table")
        out, lse, max_logit = overload(*given._replace(**_folded(given, dims, size)))  # type: ignore[arg-type]
        lse_heads_dim = HEADS_DIM["lse"] if given.cu_seqlens_q is None else _PACKED_LSE_HEADS_DIM
        heads = _shape_of_one(given.query, dims.query)[1] if given.return_max_logit else 0
        results = (
            unfold_heads(out, size, HEADS_DIM["out"]),
            unfold_heads(lse, size, lse_heads_dim),
            max_logit.view(size, heads),
        )
        return results, (0, 0, 0)

    return rule


def _vmap_backward(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        given, size = AttentionBackwardArguments(*args), info.batch_size
        dims: Any = AttentionBackwardArguments(*in_dims)  # type: ignore[arg-type]
        refuse_mapped(dims, *_ONE_FOR_ALL_SAMPLES)
        shares_bias = given.bias is not None and _shape_of_one(given.bias, dims.bias)[1] == 1
        if given.bias_grad and given.bias is not None and dims.bias is None:
            given = given._replace(bias=given.bias.unsqueeze(0).expand(size, *given.bias.shape))
            dims = dims._replace(bias=0)  # every sample wants a gradient of its own
        grads = overload(*given._replace(**_folded(given, dims, size)))  # type: ignore[arg-type]
        *grads_of_inputs, grad_bias, grad_sinks, grad_slopes = grads
        if given.bias_grad:
            grad_bias = unfold_heads(grad_bias, size, 1)
            grad_bias = grad_bias.sum(2, keepdim=True) if shares_bias else grad_bias
        else:
            grad_bias = grad_bias.expand(size, 0)
        sinks_heads_dim = HEADS_DIM["sinks"]
        grad_sinks = (
            grad_sinks.expand(size, 0) if given.sinks is None else unfold_heads(grad_sinks, size, sinks_heads_dim)
        )
        slopes_heads_dim = HEADS_DIM["alibi_slopes"]
        grad_slopes = (
            unfold_heads(grad_slopes, size, slopes_heads_dim) if given.slopes_grad else grad_slopes.expand(size, 0)
        )
        unfolded = (unfold_heads(grad, size, 1) for grad in grads_of_inputs)
        return (*unfolded, grad_bias, grad_sinks, grad_slopes), (0, 0, 0, 0, 0, 0)

    return rule


register(
    "attention_forward",
    arguments=AttentionArguments,
    triton_module="attention_forward",
    fake=_fake_forward,
    flops=_forward_flops,
    vmap=_vmap_forward,
)
register(
    "attention_backward",
    arguments=AttentionBackwardArguments,
    triton_module="attention_backward",
    fake=_fake_backward,
    flops=_backward_flops,
    vmap=_vmap_backward,
)
register(
    "attention_backward_add",
    arguments=AttentionBackwardAddArguments,
    triton_module="attention_backward",
    fake=_fake_backward_add,
    flops=_backward_add_flops,
)
