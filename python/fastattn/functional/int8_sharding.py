"""Implements slices, concatenations and collectives of int8 weights for DDP, FSDP2 and tensor parallelism.

A collective runs twice for a weight: first for the data, then for the scales.

Importing this module registers these operators for ``Int8Tensor``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.after_import import after_import
from fastattn.errors import InputError
from fastattn.functional.int8_tensor import (
    Int8Tensor,
    expect_of_weight,
    in_matrix_form,
    like,
    replaces_operator,
    row_stride_of,
    scales_have_rows,
)
from fastattn.layout import with_aligned_rows

_aten = torch.ops.aten


@replaces_operator(_aten.slice.Tensor)
def _slice(
    op: Any, weight: Int8Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Int8Tensor:
    weight, dim = in_matrix_form(weight, op), dim % 2
    size = weight.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    expect_of_weight(step == 1, "slice", "a step of 1", step)
    end = max(end, start)
    data, scale = op(weight.int8_data, dim, start, end), weight.int8_scale
    if dim == 0:
        scale = op(scale, 0, start, end) if scales_have_rows(weight) else scale
    elif isinstance(weight.granularity, int):
        group = weight.granularity
        is_whole = start % group == 0 and (end % group == 0 or start == end)
        expect_of_weight(is_whole, "slice", f"whole groups of {group} columns", f"columns {start} to {end}")
        scale = op(scale, 1, start // group, end // group)
    return like(weight, data, scale, row_stride_of(weight))


@replaces_operator(_aten.split.Tensor)
def _split(op: Any, weight: Int8Tensor, split_size: int, dim: int = 0) -> list[Int8Tensor]:
    size = weight.shape[dim]
    starts = range(0, max(size, 1), max(split_size, 1))
    return [_slice(_aten.slice.Tensor, weight, dim, start, min(start + split_size, size)) for start in starts]


@replaces_operator(_aten.split_with_sizes.default)
def _split_with_sizes(op: Any, weight: Int8Tensor, sizes: Any, dim: int = 0) -> list[Int8Tensor]:
    ends = zip(sizes, itertools.accumulate(sizes), strict=True)
    return [_slice(_aten.slice.Tensor, weight, dim, end - size, end) for size, end in ends]


@replaces_operator(_aten.index_select.default)
def _index_select(op: Any, weight: Int8Tensor, dim: int, index: Tensor) -> Int8Tensor:
    """Selects rows. DTensor uses it to order the rows of gathered shards that are not consecutive parts of the
    weight."""
    weight = in_matrix_form(weight, op)
    expect_of_weight(dim % 2 == 0, "index_select", "dim 0, its rows", "dim 1")
    data, scale = with_aligned_rows(op(weight.int8_data, 0, index)), weight.int8_scale
    return like(weight, data, op(scale, 0, index) if scales_have_rows(weight) else scale.clone())


@replaces_operator(_aten.constant_pad_nd.default)
def _pad(op: Any, weight: Int8Tensor, padding: Any, value: float = 0) -> Int8Tensor:
    """Appends rows of zeros, so that all shards of a weight have the same size."""
    weight, (left, right, above, below) = in_matrix_form(weight, op), (*padding, 0, 0)[:4]
    expect_of_weight(left == right == above == value == 0, "pad", "rows of zeros below it", list(padding))
    data = with_aligned_rows(op(weight.int8_data.contiguous(), [0, 0, 0, below]))
    scale = weight.int8_scale
    return like(weight, data, op(scale, [0, 0, 0, below], 1.0) if scales_have_rows(weight) else scale.clone())


@replaces_operator(_aten.cat.default)
def _cat(op: Any, tensors: Any, dim: int = 0) -> Tensor:
    if any(isinstance(tensor, Int8Tensor) and tensor.form == "flat" for tensor in tensors) or not tensors:
        return FlatTensors(list(tensors))
    granularities = {getattr(tensor, "granularity", None) for tensor in tensors}
    is_alike = len(granularities) == 1 and None not in granularities
    expect_of_weight(is_alike, "cat", "int8 weights of one granularity", ", ".join(sorted(map(str, granularities))))
    first, dim = in_matrix_form(tensors[0], op), dim % 2
    data = with_aligned_rows(op([tensor.int8_data for tensor in tensors], dim))
    scales = [tensor.int8_scale for tensor in tensors]
    if scales_have_rows(first) and (dim == 0 or isinstance(first.granularity, int)):
        return like(first, data, op(scales, dim))
    shared = all(other is scales[0] or torch.equal(other, scales[0]) for other in scales[1:])
    expect_of_weight(shared, "cat", f"weights with the same {first.granularity!r} scales", "different scales")
    return like(first, data, scales[0].clone())


class FlatTensors(Tensor):
    """Represents the concatenation of flat tensors, some of them int8 weights, which DDP broadcasts at once.

    It holds the original tensors in ``parts``: a broadcast writes into them, and a slice returns one of them.
    """

    parts: list[Tensor]

    @staticmethod
    def __new__(cls, parts: list[Tensor]) -> FlatTensors:
        self: FlatTensors = torch.Tensor._make_wrapper_subclass(
            cls, (sum(part.numel() for part in parts),), dtype=parts[0].dtype, device=parts[0].device
        )
        self.parts = parts
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.c10d.broadcast_.default:
            return _broadcast_(func, *args, **(kwargs or {}))
        if func is torch.ops.aten.slice.Tensor:
            return cls._part(*args, **(kwargs or {}))
        raise InputError(
            f"{func}: does not take int8 weights that were concatenated with other tensors; concatenate "
            "weight.dequantize() instead"
        )

    @staticmethod
    def _part(flat: FlatTensors, dim: int = 0, start: int = 0, end: int = 0, step: int = 1) -> Tensor:
        starts = itertools.accumulate((part.numel() for part in flat.parts), initial=0)
        for part, first in zip(flat.parts, starts, strict=False):
            if (first, first + part.numel()) == (start, end):
                return part.detach()
        raise InputError(
            f"slice of concatenated int8 weights: expected the elements of one of the tensors, got {start} to {end} "
            f"of {flat.numel()}; concatenate weight.dequantize() instead"
        )


# --- collectives ------------------------------------------------------------------------------------------------------


def _replaces_collective(namespace: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the decorated function replace a collective, if this build of torch has the collective."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return (lambda replacement: replacement) if packet is None else replaces_operator(packet.default)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that ``tensor`` consists of."""
    if isinstance(tensor, FlatTensors):
        return [part for each in tensor.parts for part in _parts(each)]
    return [tensor.int8_data, tensor.int8_scale] if isinstance(tensor, Int8Tensor) else [tensor]


def _into_parts(output: Tensor, run: Callable[[int, Tensor], Any]) -> Any:
    """Runs the collective ``run(i, part)``, which writes ``part``, for each plain tensor of ``output``. Waits for each
    collective, and returns the handle of the last one."""
    work = None
    for i, part in enumerate(_parts(output)):
        dense = part.contiguous()  # a copy if rows are padded
        _, work = run(i, dense)
        dist.Work.unbox(work).wait()
        if dense is not part:
            part.copy_(dense)
    return work


@_replaces_collective("c10d", "broadcast_")
def _broadcast_(op: Any, tensors: list[Tensor], *arguments: Any) -> tuple[list[Tensor], Any]:
    return tensors, _into_parts(tensors[0], lambda i, part: op([part], *arguments))


@_replaces_collective("c10d", "scatter_")
def _scatter_(op: Any, outputs: list[Tensor], inputs: list[list[Tensor]], *arguments: Any) -> tuple[list[Tensor], Any]:
    def scatter(i: int, part: Tensor) -> Any:
        return op([part], [[_parts(tensor)[i].contiguous() for tensor in each] for each in inputs], *arguments)

    return outputs, _into_parts(outputs[0], scatter)


@_replaces_collective("_c10d_functional", "all_gather_into_tensor")
def _all_gather(op: Any, weight: Int8Tensor, group_size: int, group_name: Any) -> Int8Tensor:
    """Gathers the rows of all ranks, waits for the rows, and returns them concatenated."""

    def gather(part: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(op(part.contiguous(), group_size, group_name))

    scale = gather(weight.int8_scale) if scales_have_rows(weight) else weight.int8_scale.clone()
    return like(weight, with_aligned_rows(gather(weight.int8_data)), scale)


@_replaces_collective("_c10d_functional", "wait_tensor")
def _already_waited(op: Any, weight: Int8Tensor) -> Int8Tensor:
    return weight.detach()  # type: ignore[return-value]


def _replace_wrap() -> None:
    _replaces_collective("_c10d_functional", "_wrap_tensor_autograd")(_already_waited)  # torch 2.10 does not have it


# Importing this module of torch defines the operator, and DTensor imports the module.
after_import("torch.distributed._functional_collectives", _replace_wrap)
