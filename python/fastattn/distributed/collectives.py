"""torch's functional collectives, with their gradients. A rank's loss is a part of the whole: gradients of what ranks
gave each other add up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from fastattn.errors import InputError

Group = dist.ProcessGroup | DeviceMesh | None

# Their names until torch 2.12.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

_GATHER, _ULYSSES = "gather_sequence", "context_parallel_attention with strategy 'ulysses'"


def process_groups(group: Group) -> list[dist.ProcessGroup]:
    """The groups that an argument names: None is the default one, and a mesh has one for each of its dimensions."""
    if isinstance(group, DeviceMesh):
        return [group.get_group(dim) for dim in range(group.ndim)]
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "group: expected an initialised process group (torch.distributed.init_process_group), got none"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(found) < 0:
        raise InputError("group: expected a group that this rank belongs to, got one without it")
    return [found]


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[n, …]`` of each rank to ``[W * n, …]`` on all: to be waited for."""
    gathered: Tensor = _all_gather(x, 0, group)
    return gathered


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[W * n, …]`` of each rank to ``[n, …]``, its part of the sums: to be waited for."""
    scattered: Tensor = _reduce_scatter(x, "sum", 0, group)
    return scattered


def start_all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """So many entries of ``[n, …]`` to and from each rank: to be waited for."""
    exchanged: Tensor = functional.all_to_all_single(x, received, sent, group)
    return exchanged


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return waited(start_all_gather(x.contiguous(), group), _GATHER)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return waited(start_reduce_scatter(grad.contiguous(), ctx.group), _GATHER), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return waited(functional.all_to_all_single(x.contiguous(), None, None, group), _ULYSSES)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return waited(functional.all_to_all_single(grad.contiguous(), None, None, ctx.group), _ULYSSES), None


def waited(tensor: Tensor, call: str) -> Tensor:
    """A plain tensor: what eager collectives return waits where it is used first."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(tensor)
    with naming(call):
        return functional.wait_tensor(tensor)


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """Where other ranks are waited for: torch's own error, of a time-out or a lost rank, says in which call."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: waited in vain for another rank of the group, which has died or has not made this call. {error}"
        ) from error


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[n, …]`` of each rank to ``[W * n, …]`` on all, by rank. The gradients that all ranks have for x are added."""
    gathered: Tensor = _AllGather.apply(x, group)
    return gathered


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[W, …]``: entry r goes to rank r, and comes from there."""
    exchanged: Tensor = _AllToAll.apply(x, group)
    return exchanged
