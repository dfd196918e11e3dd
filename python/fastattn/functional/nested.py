"""Computes attention over nested tensors: converts jagged tensors to packed sequences, and passes strided nested
tensors to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.dispatch.choose import choose
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.dispatch.recording import note
from fastattn.errors import InputError
from fastattn.functional.torch_sdpa import torch_sdpa
from fastattn.ops.describe import request_for_attention

_JAGGED = "a jagged tensor [B, H, j, D] (torch.nested, layout=torch.jagged: [B, j, H, D].transpose(1, 2))"


class Unpacked(NamedTuple):
    """Holds a call over packed sequences, and the offsets and bounds with which its results are made jagged again."""

    call: AttentionCall
    offsets: Tensor
    seqlen_bounds: dict[str, Any]

    def like_query(self, rows: Tensor) -> Tensor:
        """Returns ``rows [total_q, H, …]`` as a jagged ``[B, H, j, …]`` with the query's lengths ``j``."""
        return torch.nested.nested_tensor_from_jagged(rows, self.offsets, **self.seqlen_bounds).transpose(1, 2)


def unpack(call: AttentionCall) -> Unpacked:
    """Converts a call over jagged tensors ``[B, H, j, D]`` to a call over packed sequences, without a copy.

    Raises ``InputError`` for other tensors.
    """
    tensors: dict[str, Any] = {"query": call.query, "key": call.key, "value": call.value}
    for name, tensor in tensors.items():
        if not (isinstance(tensor, Tensor) and tensor.layout == torch.jagged):
            came = f"{_kind(tensor)}{_as_jagged(name, tensor)}"
            raise InputError(f"{name}: expected {_JAGGED} like the query, got {came}")
    for name, tensor in tensors.items():
        if tensor.dim() != 4 or tensor._ragged_idx != 2:
            layout = ["B", "*", "*", "*", "*"][: tensor.dim()]
            layout[tensor._ragged_idx] = "j"
            split = f"{name}.unflatten(-1, (heads, -1))" if tensor.dim() == 3 else name
            advice = f"; pass {split}.transpose(1, 2)" if tensor._ragged_idx == 1 and tensor.dim() < 5 else ""
            raise InputError(f"{name}: expected {_JAGGED}, got one of layout [{', '.join(layout)}]{advice}")
        if tensor.lengths() is not None:
            raise InputError(
                f"{name}: expected a jagged tensor without holes, got one with lengths; call contiguous() on it before "
                "the transpose"
            )
        if tensor.shape[0] != (batch := call.query.shape[0]):
            raise InputError(f"{name}: expected the query's batch size {batch}, got {tensor.shape[0]}")
    query, key, value = tensors.values()
    for name in ("bias", "key_ranges"):
        if getattr(call, name) is not None:
            raise InputError(
                f"{name}: expected None with jagged tensors, whose sequences have no common shape, got a tensor; use "
                "causal, window or alibi_slopes, or pad the sequences"
            )
    query_rows, key_rows, value_rows = (tensor.transpose(1, 2).values() for tensor in (query, key, value))
    if key.offsets() is not value.offsets():
        is_known = key.device.type == "cpu" and not torch.compiler.is_compiling()
        if key_rows.shape[0] != value_rows.shape[0] or (is_known and not torch.equal(key.offsets(), value.offsets())):
            came = "other offsets; make both by torch.nested.nested_tensor_from_jagged with the same offsets"
            raise InputError(f"value: expected sequences as long as the key's, got {came}")
    cu_seqlens_q = query.offsets().to(torch.int32)
    cu_seqlens_k = cu_seqlens_q if key.offsets() is query.offsets() else key.offsets().to(torch.int32)
    packed = call._replace(
        query=query_rows,
        key=key_rows,
        value=value_rows,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_longest(query, query_rows),
        max_seqlen_k=_longest(key, key_rows),
    )
    bounds = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return Unpacked(packed, query.offsets(), bounds)


def attend_jagged(
    call: AttentionCall, attend: Callable[[AttentionCall], Tensor | tuple[Tensor, ...]]
) -> Tensor | tuple[Tensor, ...]:
    """Runs ``attend`` over the sequences of jagged tensors; output and lse are jagged like the query."""
    packed = unpack(call)
    result = attend(packed.call)
    if isinstance(result, Tensor):
        return packed.like_query(result)
    out, *others = result
    if call.return_lse:
        others[0] = packed.like_query(others[0].transpose(0, 1))
    return packed.like_query(out), *others


def attend_strided(call: AttentionCall) -> Tensor:
    """Computes attention over strided nested ``[B, H, S, D]`` with PyTorch. The scale is the only option."""
    query, key, value = call[:3]
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout == torch.jagged:
            came = f"{_kind(tensor)}; pass three strided ones, or three jagged ones"
            raise InputError(f"{name}: expected a strided nested tensor, as the query is, got {came}")
    given = call._replace(deterministic=None, dropout_seed=None)
    if given[3:] != AttentionCall(query, key, value, scale=call.scale)[3:]:
        raise InputError(
            f"query: expected {_JAGGED} for a call with options, got a strided nested tensor, which takes only "
            f"scale{_as_jagged('query', query)}"
        )
    request = request_for_attention(query, value, only_torch=only_torch_handles(query))
    choice = choose(request)
    try:
        result: Tensor = torch_sdpa(query, key, value, scale=call.scale)
    except RuntimeError as error:
        came = f"a strided nested one that PyTorch refuses{_as_jagged('query', query)}. PyTorch says: {error}"
        raise InputError(f"query: expected {_JAGGED}, got {came}") from error
    note(request.op.name, choice.backend, choice.kernel)
    return result


def _longest(tensor: Any, rows: Tensor) -> int:
    """Returns the longest length, or an upper bound if the host does not know the lengths."""
    known: int | None = tensor._maybe_max_seqlen
    if known is not None:
        return known
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return rows.shape[0]
    return max(tensor.offsets().diff().tolist(), default=0)


def _as_jagged(name: str, value: Any) -> str:
    """Returns the end of an error: how to convert a dense or a strided nested ``[B, H, S, D]`` to a jagged tensor."""
    if not isinstance(value, Tensor) or value.layout == torch.jagged or value.dim() != 4:
        return ""
    rows = f"[x.transpose(0, 1) for x in {name}.unbind()]"
    return f"; pass torch.nested.as_nested_tensor({rows}, layout=torch.jagged).transpose(1, 2)"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not value.is_nested:
        return f"a dense tensor {list(value.shape)}"
    return "a jagged tensor" if value.layout == torch.jagged else "a strided nested tensor"
