"""Defines the operators ``attention_forward`` and ``attention_backward``."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastattn import native
from fastattn.call import AttentionCall
from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.recording import is_recording, note
from fastattn.layout import empty_like_heads
from fastattn.ops.flops import attention_backward_flops, attention_flops
from fastattn.ops.registration import apply, fold_into_heads, refuse_mapped, register, unfold_heads

Results: TypeAlias = tuple[Tensor, Tensor, Tensor]  # output, lse, largest scores


class AttentionBackward(NamedTuple):
    """Holds a backward pass: the gradients of output and lse, and the arguments and results of the forward pass.

    ``call`` is a checked ``AttentionCall``, or the ``Arguments`` of ``attention_forward``. ``bias_grad`` and
    ``slopes_grad`` say whether the gradients of the bias and of the slopes are wanted. ``attention_backward_add`` adds
    the gradients of query, key and value to ``grad_query``, ``grad_key`` and ``grad_value``, which are float32.
    """

    call: Any
    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    deterministic: bool
    bias_grad: bool = False
    slopes_grad: bool = False
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


def differentiable_attention(backend: str, call: AttentionCall) -> Results:
    """Returns output, lse and largest scores; the first two are differentiable in query, key, value, bias, slopes and
    sinks."""
    arguments = attention_forward.arguments(call)
    out, lse, max_logit = apply(_Attention, backend, is_deterministic(call), *arguments)
    return out, lse, max_logit.detach()  # under vmap it would require gradients


def is_deterministic(call: AttentionCall) -> bool:
    """Returns whether the gradients must have the same bits every time."""
    return torch.are_deterministic_algorithms_enabled() if call.deterministic is None else call.deterministic


def note_backward(backend: str, backward: AttentionBackward) -> None:
    if is_recording():
        note("attention backward", backend, backward_kernels(backend, backward))


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # forward and backward each call one operator, which has a vmap rule

    @staticmethod
    def forward(backend: str, deterministic: bool, *arguments: Any) -> Results:
        return attention_forward.run(backend, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        ctx.backend, ctx.deterministic, *arguments = inputs
        out, lse, max_logit = output
        ctx.mark_non_differentiable(max_logit)
        ctx.save_for_backward(*[arguments[index] for index in _SAVED], out, lse)
        ctx.options = [None if index in _TENSORS else value for index, value in enumerate(arguments)]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max: None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return None, None, *([None] * len(_INDEX_OF))
        *saved, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        arguments = list(ctx.options)
        for index, tensor in zip(_SAVED, saved, strict=True):
            arguments[index] = tensor
        bias, sinks = arguments[_INDEX_OF["bias"]], arguments[_INDEX_OF["sinks"]]
        _, _, *needs_grad = ctx.needs_input_grad
        bias_grad = bias is not None and bool(needs_grad[_INDEX_OF["bias"]])
        slopes_grad = arguments[_INDEX_OF["alibi_slopes"]] is not None and bool(needs_grad[_INDEX_OF["alibi_slopes"]])
        own = (grad_out, grad_lse, out, lse, ctx.deterministic, bias_grad, slopes_grad)
        pool = (*arguments, *own)
        grads = attention_backward.run_in_backward(ctx.backend, [pool[index] for index in _IN_BACKWARD_ORDER])
        if is_recording():
            note_backward(ctx.backend, AttentionBackward(attention_forward.Arguments(*arguments), *own))
        grad_query, grad_key, grad_value, grad_bias, grad_sinks, grad_slopes = grads
        gradient_of = {
            "query": grad_query,
            "key": grad_key,
            "value": grad_value,
            "bias": grad_bias.to(bias.dtype) if bias_grad else None,
            "alibi_slopes": grad_slopes if slopes_grad else None,
            "sinks": None if sinks is None else grad_sinks,
        }
        return None, None, *[gradient_of.get(name) for name in _INDEX_OF]


def backward_kernels(backend: str, backward: AttentionBackward) -> str:
    """Returns the names of the kernels that ``attention_backward`` launches, in order, joined by " + ".

    The Triton kernels that list the tiles of key ranges are left out.
    """
    if backend == "triton":
        asked_for = [("bias", backward.bias_grad), ("slopes", backward.slopes_grad)]
        launched = ["rows", "query", "key_value", *(name for name, wanted in asked_for if wanted)]
        return " + ".join(f"attention_backward_{name}.attention_backward_{name}_kernel" for name in launched)
    call, query = backward.call, backward.call.query
    has_ranges = call.key_ranges is not None
    has_scores_changed = call.bias is not None or call.alibi_slopes is not None or has_ranges
    facts = kernel_facts(query.device)
    names = native.attention_backward_kernels(
        facts.arch,
        facts.shared_memory_bytes,
        query.shape[-1],
        call.value.shape[-1],
        query.dtype,
        changes_scores=has_scores_changed or call.softcap > 0 or call.dropout_p > 0,
        key_ranges=has_ranges,
        bias_gradient=backward.bias_grad,
        sinks=call.sinks is not None,
        slopes_gradient=backward.slopes_grad,
    )
    return " + ".join(names)


# --- shapes ---------------------------------------------------------------------------------------------------------


def _fake_forward(given: Any) -> Results:
    query, value_dim, heads = given.query, given.value.shape[-1], given.query.shape[1]
    max_logit = query.new_empty(heads if given.return_max_logit else 0, dtype=torch.float32)
    dtype = torch.float32 if given.exact_out else query.dtype
    if given.cu_seqlens_q is not None:
        total = query.shape[0]
        lse = query.new_empty(heads, total, dtype=torch.float32)
        return query.new_empty(total, heads, value_dim, dtype=dtype), lse, max_logit
    return empty_like_heads(query, value_dim, dtype), query.new_empty(query.shape[:3], dtype=torch.float32), max_logit


def _fake_backward(given: Any) -> tuple[Tensor, ...]:
    inputs = (given.query, given.key, given.value)
    if given.cu_seqlens_q is not None:
        grads = tuple(t.new_empty(t.shape) for t in inputs)
    else:
        grads = tuple(empty_like_heads(t, t.shape[-1]) for t in inputs)
    options = (given.bias, given.bias_grad), (given.sinks, True), (given.alibi_slopes, given.slopes_grad)
    return *grads, *(_fake_gradient(given, *option) for option in options)


def _fake_gradient(given: Any, tensor: Tensor | None, is_wanted: bool) -> Tensor:
    """Returns an empty float32 gradient of the optional ``tensor``, ``[0]`` if it is not wanted."""
    shape = tensor.shape if is_wanted and tensor is not None else (0,)
    return given.query.new_empty(shape, dtype=torch.float32)


# --- FLOPs: every pair of query and key counts, masked or not, as for torch's own attention -------------------------


def _pairs(given: Any) -> int:
    query, key = given.query, given.key
    return query[0] * query[1] * (query[2] * key[2] if len(query) == 4 else given.max_seqlen_k)


def _backward_flops(given: Any) -> int:
    return attention_backward_flops(_pairs(given), given.key[-1], given.value[-1])


# --- vmap: the mapped dimension is folded into the heads ------------------------------------------------------------
# Head ``h`` of sample ``v`` becomes head ``v * Hq + h`` and reads KV head ``v * Hkv + h // group``: one launch for all.


def _fold_shared(tensor: Tensor | None, mapped: int | None, size: int, heads: int, heads_dim: int) -> Tensor | None:
    """Folds the mapped dimension of a bias or of key ranges into the heads.

    Returns a tensor that all heads share unchanged if it is not mapped. If it is mapped, each sample's entry is
    repeated for all heads.
    """
    if tensor is None or (mapped is None and tensor.shape[heads_dim] == 1):
        return tensor
    folded = fold_into_heads(tensor, mapped, size, heads_dim)
    assert folded is not None
    is_shared = _shape_of_one(tensor, mapped)[heads_dim] != heads
    return folded.repeat_interleave(heads, dim=heads_dim) if is_shared else folded


def _shape_of_one(tensor: Tensor, mapped: int | None) -> torch.Size:
    """Returns the shape of one sample: the shape without the dim ``mapped``. None means that no dim is mapped."""
    return tensor.shape if mapped is None else tensor.movedim(mapped, 0).shape[1:]


# Argument → the dimension of its heads in one sample. For lse and grad_lse, this holds only in dense calls.
HEADS_DIM = {"sinks": 0} | dict.fromkeys(
    ("query", "key", "value", "out", "grad_out", "lse", "grad_lse", "alibi_slopes"), 1
)
_PACKED_LSE_HEADS_DIM = 0
_ONE_FOR_ALL_SAMPLES = ("dropout_seed", "cu_seqlens_q", "cu_seqlens_k")


def _folded(given: Any, dims: Any, size: int) -> dict[str, Tensor | None]:
    """Returns the arguments that have heads, with the mapped dimension folded into the heads."""
    packed = given.cu_seqlens_q is not None
    folded = {}
    for name, heads_dim in HEADS_DIM.items():
        if name in given._fields:
            dim = _PACKED_LSE_HEADS_DIM if packed and name in ("lse", "grad_lse") else heads_dim
            folded[name] = fold_into_heads(getattr(given, name), getattr(dims, name), size, dim)
    heads = _shape_of_one(given.query, dims.query)[1]
    folded["bias"] = _fold_shared(given.bias, dims.bias, size, heads, heads_dim=1)
    folded["key_ranges"] = _fold_shared(given.key_ranges, dims.key_ranges, size, heads, heads_dim=0 if packed else 1)
    return folded


def _vmap_forward(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
    refuse_mapped(dims, *_ONE_FOR_ALL_SAMPLES, "block_table")
    out, lse, max_logit = overload(*given._replace(**_folded(given, dims, size)))
    lse_heads_dim = HEADS_DIM["lse"] if given.cu_seqlens_q is None else _PACKED_LSE_HEADS_DIM
    heads = _shape_of_one(given.query, dims.query)[1] if given.return_max_logit else 0
    results = (
        unfold_heads(out, size, HEADS_DIM["out"]),
        unfold_heads(lse, size, lse_heads_dim),
        max_logit.view(size, heads),
    )
    return results, (0, 0, 0)


def _vmap_backward(overload: torch._ops.OpOverload, given: Any, dims: Any, size: int) -> Any:
    refuse_mapped(dims, *_ONE_FOR_ALL_SAMPLES)
    shares_bias = given.bias is not None and _shape_of_one(given.bias, dims.bias)[1] == 1
    if given.bias_grad and given.bias is not None and dims.bias is None:
        given = given._replace(bias=given.bias.unsqueeze(0).expand(size, *given.bias.shape))
        dims = dims._replace(bias=0)  # each sample gets its own gradient of the shared bias
    *grads, grad_bias, grad_sinks, grad_slopes = overload(*given._replace(**_folded(given, dims, size)))

    def unfolded(grad: Tensor, is_wanted: bool, heads_dim: int) -> Tensor:
        return unfold_heads(grad, size, heads_dim) if is_wanted else grad.expand(size, 0)

    grad_bias = unfolded(grad_bias, given.bias_grad, 1)
    if given.bias_grad and shares_bias:
        grad_bias = grad_bias.sum(2, keepdim=True)
    grad_sinks = unfolded(grad_sinks, given.sinks is not None, HEADS_DIM["sinks"])
    grad_slopes = unfolded(grad_slopes, given.slopes_grad, HEADS_DIM["alibi_slopes"])
    grads = [unfold_heads(grad, size, 1) for grad in grads]
    return (*grads, grad_bias, grad_sinks, grad_slopes), (0, 0, 0, 0, 0, 0)


attention_forward = register(
    "attention_forward",
    AttentionCall,
    triton_module="attention_forward",
    fake=_fake_forward,
    flops=lambda given: attention_flops(_pairs(given), given.key[-1], given.value[-1]),
    vmap=_vmap_forward,
)
attention_backward = register(
    "attention_backward",
    AttentionBackward,
    triton_module="attention_backward",
    fake=_fake_backward,
    flops=_backward_flops,
    vmap=_vmap_backward,
)
attention_backward_add = register(
    "attention_backward_add",
    AttentionBackward,
    triton_module="attention_backward",
    fake=lambda given: _fake_gradient(given, given.alibi_slopes, given.slopes_grad),
    flops=_backward_flops,
)
_INDEX_OF = {name: index for index, name in enumerate(attention_forward.Arguments._fields)}
_TENSORS = [_INDEX_OF[name] for name in attention_forward.tensors]
# The indices of the tensors of the forward pass that the backward pass reads.
_SAVED = [_INDEX_OF[name] for name in attention_forward.tensors if name in attention_backward.Arguments._fields]
# The backward operator's arguments are picked by index from the forward arguments and the fields of AttentionBackward.
_POOL = (*_INDEX_OF, *AttentionBackward._fields[1:])
_IN_BACKWARD_ORDER = [_POOL.index(name) for name in attention_backward.Arguments._fields]
