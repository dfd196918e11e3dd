"""Shards a sequence over the W ranks of a group, in one of two layouts, and gathers it.

``"contiguous"`` cuts the sequence into W parts of equal length, and rank r has part r. ``"zigzag"`` cuts it into 2 W
parts, and rank r has parts r and 2 W - 1 - r, so that all ranks have equal work under a causal mask (Llama 3, section
3.3.2).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.checks import check_choice, check_int, check_tensor, expect
from fastattn.distributed.collectives import Group, all_gather, process_groups

LAYOUTS = ("contiguous", "zigzag")


def parts_per_rank(layout: str) -> int:
    check_choice("layout", layout, LAYOUTS)
    return LAYOUTS.index(layout) + 1


def parts_of_rank(layout: str, rank: int, world_size: int) -> tuple[int, ...]:
    """Returns the parts of the sequence that a rank has, in the order of its rows."""
    return (rank,) if parts_per_rank(layout) == 1 else (rank, 2 * world_size - 1 - rank)


def in_order_of_parts(x: Tensor, dim: int, layout: str, world_size: int) -> Tensor:
    """Reorders ``dim`` of ``x`` from the order of ranks to the order of the sequence."""
    by_rank = _by_rank(layout, world_size)
    return _reordered(x, dim, [by_rank.index(part) for part in range(len(by_rank))])


def in_order_of_ranks(x: Tensor, dim: int, layout: str, world_size: int) -> Tensor:
    """Undoes ``in_order_of_parts``."""
    return _reordered(x, dim, _by_rank(layout, world_size))


def _by_rank(layout: str, world_size: int) -> list[int]:
    """Returns the parts of all ranks, one rank after the other."""
    return [part for rank in range(world_size) for part in parts_of_rank(layout, rank, world_size)]


def _reordered(x: Tensor, dim: int, order: list[int]) -> Tensor:
    if order == list(range(len(order))):
        return x
    parts = x.tensor_split(len(order), dim)
    return torch.cat([parts[index] for index in order], dim)


def shard_sequence(x: Tensor, dim: int, *, group: Group = None, layout: str = "contiguous") -> Tensor:
    """Returns this rank's parts of ``x``. All ranks pass the same whole ``x``.

    It is differentiable. A rank's gradient of ``x`` is zero in the parts of other ranks; the sum of the gradients over
    all ranks is the whole gradient.

    Args:
        x: any tensor, whose ``dim`` is the sequence.
        group: a process group, None for the default group, or a mesh, whose last dimension varies fastest.
        layout: ``"contiguous"`` or ``"zigzag"``.

    Raises:
        InputError, TypeError: a length that W (zigzag: 2 W) does not divide, or a group that is not initialised.
    """
    check_tensor("x", x)
    dim, groups = checked_dim(x, dim), process_groups(group)
    parts = parts_per_rank(layout) * math.prod(map(dist.get_world_size, groups))
    came = f"{x.shape[dim]}; pad the sequence"
    expect(x.shape[dim] % parts == 0, "x", f"a multiple of {parts} in dim {dim} for {layout}", came)
    for dim_group in groups:  # zigzag within zigzag is the zigzag order of all ranks
        rank, world_size = dist.get_rank(dim_group), dist.get_world_size(dim_group)
        in_order = x.tensor_split(parts_per_rank(layout) * world_size, dim)
        x = torch.cat([in_order[part] for part in parts_of_rank(layout, rank, world_size)], dim)
    return x


def gather_sequence(x: Tensor, dim: int, *, group: Group = None, layout: str = "contiguous") -> Tensor:
    """Gathers all ranks' parts ``x`` into the whole sequence, on all ranks: the inverse of ``shard_sequence``.

    It is differentiable: the gradient of ``x`` is the gradient of the sum of all ranks' losses. The other arguments and
    the errors are as in ``shard_sequence``.
    """
    check_tensor("x", x)
    dim, groups = checked_dim(x, dim), process_groups(group)
    parts = parts_per_rank(layout)
    expect(x.shape[dim] % parts == 0, "x", f"a multiple of {parts} in dim {dim} for {layout}", x.shape[dim])
    for dim_group in reversed(groups):
        gathered = all_gather(x.movedim(dim, 0), dim_group)
        x = in_order_of_parts(gathered, 0, layout, dist.get_world_size(dim_group)).movedim(0, dim)
    return x


def checked_dim(x: Tensor, dim: int) -> int:
    check_int("dim", dim)
    expect(-x.dim() <= dim < x.dim(), "dim", f"one of the {x.dim()} dimensions of x", dim)
    return dim % x.dim()
