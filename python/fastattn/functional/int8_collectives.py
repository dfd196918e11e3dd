"""int8 weights in the collectives of DDP, FSDP2 and tensor parallelism: first the data are sent, then the scales."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastattn.checks import expect
from fastattn.errors import InputError
from fastattn.functional.int8_tensor import Int8Tensor, like, replaces_operator, scales_have_rows
from fastattn.layout import ALIGNMENT_BYTES, with_aligned_rows

_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional


class FlatTensors(Tensor):
    """Flat tensors, int8 weights among them, that DDP has concatenated to broadcast them at once.

    This holds the tensors themselves, so that the broadcast writes into them, and slices give them back.
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
        if func is _c10d.broadcast_.default:
            return _broadcast_(func, *args, **(kwargs or {}))
        if func is torch.ops.aten.slice.Tensor:
            return cls._part(*args, **(kwargs or {}))
        raise InputError(f"{func}: does not take int8 weights that were concatenated with other tensors")

    @staticmethod
    def _part(flat: FlatTensors, dim: int = 0, start: int = 0, end: int = 0, step: int = 1) -> Tensor:
        starts = itertools.accumulate((part.numel() for part in flat.parts), initial=0)
        for part, first in zip(flat.parts, starts, strict=False):
            if (first, first + part.numel()) == (start, end):
                return part.detach()
        raise InputError(f"slice: expected one of the concatenated tensors, got {start} to {end} of {flat.numel()}")


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that ``tensor`` consists of."""
    if isinstance(tensor, FlatTensors):
        return [part for each in tensor.parts for part in _parts(each)]
    return [tensor.int8_data, tensor.int8_scale] if isinstance(tensor, Int8Tensor) else [tensor]


def _wait(work: Any) -> None:
    dist.Work.unbox(work).wait()


@replaces_operator(_c10d.broadcast_.default)
def _broadcast_(op: Any, tensors: list[Tensor], *arguments: Any) -> tuple[list[Tensor], Any]:
    work = None
    for part in _parts(tensors[0]):
        dense = part.contiguous()  # a copy where rows have room behind them
        _, work = op([dense], *arguments)
        _wait(work)
        if dense is not part:
            part.copy_(dense)
    return tensors, work


@replaces_operator(_c10d.scatter_.default)
def _scatter_(op: Any, outputs: list[Tensor], inputs: list[list[Tensor]], *arguments: Any) -> tuple[list[Tensor], Any]:
    work = None
    for i, part in enumerate(_parts(outputs[0])):
        dense = part.contiguous()
        _, work = op([dense], [[_parts(tensor)[i].contiguous() for tensor in each] for each in inputs], *arguments)
        _wait(work)
        if dense is not part:
            part.copy_(dense)
    return outputs, work


@replaces_operator(_functional.all_gather_into_tensor.default)
def _all_gather(op: Any, weight: Int8Tensor, group_size: int, group_name: Any) -> Int8Tensor:
    """Gathers the rows of all ranks, waits for them, and returns them below each other."""

    def gather(part: Tensor) -> Tensor:
        whole: Tensor = _functional.wait_tensor(op(part.contiguous(), group_size, group_name))
        return whole

    scale = gather(weight.int8_scale) if scales_have_rows(weight) else weight.int8_scale.clone()
    return like(weight, with_aligned_rows(gather(weight.int8_data)), scale)


def _already_waited(op: Any, weight: Int8Tensor) -> Int8Tensor:
    return weight.detach()  # type: ignore[return-value]


for _name in ("wait_tensor", "_wrap_tensor_autograd"):  # torch 2.10 does not have the second
    if hasattr(_functional, _name):
        replaces_operator(getattr(_functional, _name).default)(_already_waited)


# --- FSDP2: the whole weight from the rows that each rank keeps -------------------------------------------------------


def tensors_to_gather(
    shard: Int8Tensor, ranks: int, whole: torch.Size
) -> tuple[tuple[Tensor, ...], tuple[torch.Size, Int8Tensor]]:
    """Returns the tensors that a rank sends, and what it remembers: the whole weight's shape and its own shard.

    Data is sent with the room behind its rows, so that the whole weight's rows are aligned too. Where ``ranks`` do not
    divide the rows, FSDP2 needs tensors of one shape, that of the largest shard. The scales are then sent as bytes in a
    tensor of the same shape as the data.
    """
    data, scale = shard.int8_data, shard.int8_scale
    rows, columns = whole
    if rows % ranks == 0:
        data = F.pad(data, (0, -columns % ALIGNMENT_BYTES)) if columns % ALIGNMENT_BYTES else data.contiguous()
        return ((data, scale.contiguous()) if scales_have_rows(shard) else (data,)), (whole, shard)
    below = (rows + ranks - 1) // ranks - data.shape[0]
    inputs = [F.pad(data, (0, 0, 0, below)).contiguous()]
    if scales_have_rows(shard):
        scale_bytes = scale.contiguous().view(torch.int8)
        behind = columns - scale_bytes.shape[1]
        expect(behind >= 0, "weight", f"rows that {ranks} ranks divide, or at least 4 columns", list(whole))
        inputs.append(F.pad(scale_bytes, (0, behind, 0, below)))
    return tuple(inputs), (whole, shard)


def weight_from_gathered(
    gathered: tuple[Tensor, ...], metadata: tuple[torch.Size, Int8Tensor], dtype: torch.dtype, out: Tensor | None
) -> tuple[Int8Tensor, tuple[Tensor, ...]] | None:
    """Returns the whole weight over the gathered memory, and the tensors that it owns besides.

    From the second time on, it updates ``out`` and returns None.
    """
    (rows, columns), shard = metadata
    data, scale, own = gathered[0][:rows, :columns], shard.int8_scale, []
    if len(gathered) == 2 and gathered[1].dtype == torch.float32:
        scale = gathered[1]
    elif len(gathered) == 2:
        scale_bytes = 4 * shard.int8_scale.shape[1]
        scale = gathered[1][:rows, :scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.float32)
        own = [scale]
    if out is None:
        return Int8Tensor(data, scale, shard.granularity, dtype), tuple(own)
    # FSDP2 keeps the parameter of the first time, whose data lies in memory that it has just filled again.
    parameter = getattr(out, "_local_tensor", out)
    assert isinstance(parameter, Int8Tensor)
    if own or not scales_have_rows(shard):
        parameter.int8_scale.data.copy_(scale)  # by .data, so that autograd, which saved it, sees no new version
    return None
