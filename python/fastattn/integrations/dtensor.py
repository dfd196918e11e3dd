"""Registers the sharding rules of fastattn's operators for DTensor.

``fastattn.attention``, ``attention_varlen`` and ``scaled_dot_product_attention`` take DTensor without these rules: each
rank attends over its own batch entries and heads. The rules serve code that calls the operators directly
(``torch.ops.fastattn.attention_forward`` and ``attention_backward``, and the same in ``fastattn_triton``): exported or
traced graphs, and custom autograd functions.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fastattn.functional.distributed_tensors import (
    DENSE,
    MAX_LOGIT,
    NEITHER,
    PACKED,
    PACKED_LSE,
    PER_HEAD,
    Dims,
    dims_of_mask,
    dims_of_options,
    placement,
)
from fastattn.ops.attention import attention_backward, attention_forward
from fastattn.ops.decode import attention_split_keys
from fastattn.ops.registration import NAMESPACES

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    # The placements of the results and of the arguments; None for an argument that is no tensor.
    _Sharding: TypeAlias = tuple[list[Placement | None], list[Placement | None]]

_LIKE_QUERY = ("query", "key", "value", "out", "grad_out")


def register_sharding() -> None:
    """Tells DTensor how it can split the operators of attention: over batch entries, and over heads if the KV heads
    divide evenly.

    Packed sequences are only split over heads, and calls with dropout are not split. Repeated calls are allowed.
    """
    from torch.distributed.tensor.experimental import register_sharding as register

    for namespace in NAMESPACES.values():
        operators = getattr(torch.ops, namespace)
        register(operators.attention_forward.default)(_forward_shardings)
        register(operators.attention_backward.default)(_backward_shardings)
        register(operators.attention_split_keys.default)(_split_keys_shardings)


def _forward_shardings(*args: Any) -> list[_Sharding]:
    given = attention_forward.Arguments(*args)
    out_and_lse = (DENSE, DENSE) if given.cu_seqlens_q is None else (PACKED, PACKED_LSE)
    results = (*out_and_lse, MAX_LOGIT if given.return_max_logit else NEITHER)
    return [
        ([_placement(kind, dims) for dims in results], _argument_placements(kind, given, len(args)))
        for kind in _kinds(given)
    ]


def _split_keys_shardings(*args: Any) -> list[_Sharding]:
    """Returns the same shardings as for a call of ``attention_forward`` with these arguments."""
    given = attention_split_keys.Arguments(*args)
    not_given = dict.fromkeys(attention_forward.Arguments._fields)
    as_forward = attention_forward.Arguments(**{**not_given, "dropout_p": 0.0, **given._asdict()})
    shardings = []
    for kind in _kinds(as_forward):
        placed = dict(zip(as_forward._fields, _argument_placements(kind, as_forward, len(as_forward)), strict=True))
        results: list[Placement | None] = [_placement(kind, DENSE), _placement(kind, DENSE)]
        shardings.append((results, [placed[name] for name in given._fields][: len(args)]))
    return shardings


def _backward_shardings(*args: Any) -> list[_Sharding]:
    given = attention_backward.Arguments(*args)
    shardings = []
    for kind in _kinds(given):
        arguments = _argument_placements(kind, given, len(args))
        placed = dict(zip(given._fields, arguments, strict=False))  # trailing arguments may be missing
        grads = [placed["query"], placed["key"], placed["value"]]
        bias, slopes = given.bias if given.bias_grad else None, given.alibi_slopes if given.slopes_grad else None
        options = (
            (bias, _dims("bias", given)),
            (given.sinks, PER_HEAD),
            (slopes, NEITHER if slopes is None else _dims("alibi_slopes", given)),
        )
        for option, dims in options:
            # If all ranks hold an option whole, each rank computes a partial gradient. The sum is the gradient.
            grads.append(_placement(None, NEITHER) if option is None else _placement(kind, dims, is_sum=True))
        shardings.append((grads, arguments))
    return shardings


def _kinds(given: Any) -> list[str | None]:
    """Returns the dimensions over which DTensor can split the call: ``"batch"``, ``"heads"``, and None for no split."""
    kinds: list[str | None] = [None]
    if given.dropout_p > 0:  # the dropout mask depends on the numbers of batch entry and head
        return kinds
    if given.cu_seqlens_q is None:
        kinds.append("batch")
    if _divides_evenly(given.key.shape[1], given.key.mesh.shape):
        kinds.append("heads")
    return kinds


def _divides_evenly(kv_heads: int, mesh_shape: tuple[int, ...]) -> bool:
    """Returns whether the KV heads divide evenly over every set of mesh dimensions that DTensor could choose.

    DTensor never splits over more ranks than there are heads.
    """
    subsets = itertools.chain.from_iterable(
        itertools.combinations(mesh_shape, length + 1) for length in range(len(mesh_shape))
    )
    return all(kv_heads % math.prod(sizes) == 0 for sizes in subsets if math.prod(sizes) <= kv_heads)


def _argument_placements(kind: str | None, given: Any, count: int) -> list[Placement | None]:
    """Returns the placements of the first ``count`` arguments: DTensor leaves out trailing arguments with defaults."""
    arguments = list(zip(given._fields, given, strict=True))[:count]
    return [
        _placement(kind, _dims(name, given)) if hasattr(argument, "placements") else None
        for name, argument in arguments
    ]


def _dims(name: str, given: Any) -> Dims:
    is_packed = given.cu_seqlens_q is not None
    if name in _LIKE_QUERY:
        return PACKED if is_packed else DENSE
    if name in ("lse", "grad_lse"):
        return PACKED_LSE if is_packed else DENSE
    if name in ("alibi_slopes", "sinks"):
        return dims_of_options(getattr(given, name).shape)
    if name == "bias" and given.bias is not None:
        return dims_of_mask(given.bias.shape)
    return NEITHER


def _placement(kind: str | None, dims: Dims, is_sum: bool = False) -> Placement:
    """Returns the placement of a tensor. With ``is_sum``, a tensor that is not split is a partial sum on each rank."""
    from torch.distributed.tensor.placement_types import Partial

    placed = placement(kind, dims)
    return Partial() if is_sum and kind is not None and placed.is_replicate() else placed
