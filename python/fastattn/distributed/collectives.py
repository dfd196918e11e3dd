"""torch's functional collectives, with their gradients. A rank's loss is a part of the whole: gradients of what ranks
gave each other add up."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from fastattn.errors import InputError

Group = dist.ProcessGroup | DeviceMesh | None


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


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _waited(functional.all_gather_tensor(x.contiguous(), 0, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _waited(functional.reduce_scatter_tensor(grad.contiguous(), "sum", 0, ctx.group)), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _waited(functional.all_to_all_single(x.contiguous(), None, None, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _waited(functional.all_to_all_single(grad.contiguous(), None, None, ctx.group)), None


def _waited(tensor: Tensor) -> Tensor:
    """A plain tensor: what eager collectives return waits where it is used first."""
    return functional.wait_tensor(tensor)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[n, …]`` of each rank to ``[W * n, …]`` on all, by rank. The gradients that all ranks have for x are added."""
    gathered: Tensor = _AllGather.apply(x, group)
    return gathered


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[W, …]``: entry r goes to rank r, and comes from there."""
    exchanged: Tensor = _AllToAll.apply(x, group)
    return exchanged
