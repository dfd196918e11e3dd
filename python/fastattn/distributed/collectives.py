"""Wraps torch's collectives: asynchronous ones, which run at the same time as kernels, and differentiable ones.

The loss is the sum of all ranks' losses, so the gradients that several ranks have for one tensor are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from fastattn.errors import InputError

Group = dist.ProcessGroup | DeviceMesh | None

# torch up to 2.12 only has the second name of each line.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The names of public calls, for errors.
_GATHER = "gather_sequence"
_ALLGATHER, _ULYSSES = (f"context_parallel_attention with strategy '{name}'" for name in ("allgather", "ulysses"))


def process_groups(group: Group) -> list[dist.ProcessGroup]:
    """Returns the process groups of an argument: the default group for None, one group per dimension for a mesh."""
    if isinstance(group, DeviceMesh):
        return [group.get_group(dim) for dim in range(group.ndim)]
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "group: expected an initialised process group, got none; call torch.distributed.init_process_group() first"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(found) < 0:
        raise InputError("group: expected a group of this rank, got one of other ranks; call this only on its ranks")
    return [found]


# --- Asynchronous -----------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    """Holds a collective in flight, its result, and the tensor that it sends, which must stay alive.

    The collective comes from ``torch.distributed``, because two gathers of torch's functional collectives in flight
    crash on gloo (torch 2.13).
    """

    result: Tensor
    given: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Waits for the collective and returns its result."""
        with naming(_ALLGATHER):
            self.work.wait()
        return self.result


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Starts to gather each rank's ``[n, …]`` as ``[W * n, …]`` on all ranks."""
    gathered = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    return Started(gathered, x, _all_gather_into(gathered, x, group=group, async_op=True))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Starts to sum every rank's ``[W * n, …]``; each rank gets ``[n, …]``, its chunk of the sums."""
    scattered = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    return Started(scattered, x, _reduce_scatter_into(scattered, x, group=group, async_op=True))


def start_all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Started:
    """Starts to send ``sent[r]`` entries of ``x [n, …]`` to each rank r, and to receive ``received[r]`` from rank r."""
    exchanged = x.new_empty(sum(received), *x.shape[1:])
    return Started(exchanged, x, dist.all_to_all_single(exchanged, x, received, sent, group=group, async_op=True))


# --- Synchronous and differentiable -----------------------------------------------------------------------------------


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return waited(_all_gather(x.contiguous(), 0, group), _GATHER)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return waited(_reduce_scatter(grad.contiguous(), "sum", 0, ctx.group), _GATHER), None


class _AllToAll(torch.autograd.Function):
    """Sends ``x[r]`` of ``x [W, …]`` to rank r, and returns the received tensors as ``[W, …]``, by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return waited(functional.all_to_all_single(x.contiguous(), None, None, group), _ULYSSES)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return waited(functional.all_to_all_single(grad.contiguous(), None, None, ctx.group), _ULYSSES), None


def waited(tensor: Tensor, call: str) -> Tensor:
    """Waits for a functional collective and returns a plain tensor.

    Without this function, an eager collective would wait where its result is first used, outside of ``naming``.
    """
    if torch.compiler.is_compiling():
        return functional.wait_tensor(tensor)
    with naming(call):
        return functional.wait_tensor(tensor)


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """Adds the name of the call to torch's error about a time-out or a lost rank, raised inside the ``with`` block."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: waited in vain for another rank of the group, which has died or has not made this call; "
            f"FASTATTN_CHECK=1 finds arguments that differ between ranks. {error}"
        ) from error


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers each rank's ``x [n, …]`` as ``[W * n, …]``, in the order of ranks.

    The gradient of ``x`` is summed over all ranks.
    """
    return _AllGather.apply(x, group)


def to_own_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges a rank's rows of all heads, ``[B, H, n, D]``, for all rows of its heads, ``[B, H / W, W * n, D]``."""
    by_rank = _AllToAll.apply(x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0), group)
    return by_rank.movedim(0, 2).flatten(2, 3)


def to_all_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undoes ``to_own_heads``."""
    by_rank = _AllToAll.apply(x.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0), group)
    return by_rank.movedim(0, 1).flatten(1, 2)
