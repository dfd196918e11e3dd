"""Checks with ``FASTATTN_CHECK=1`` that all ranks of a group make the same call. A mistake on one rank then raises on
every rank; without the check the other ranks would wait for that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fastattn.checks import device_checks_are_on
from fastattn.errors import InputError


def checked_on_all_ranks(groups: Sequence[dist.ProcessGroup], check: Callable[[], dict[str, Any]]) -> None:
    """Runs ``check``, which either raises or returns by name the values that all ranks must share.

    ``groups`` is one process group, or the groups of a mesh in the order of its dimensions.
    """
    if not device_checks_are_on():
        check()
        return
    error, facts = None, {}
    try:
        facts = check()
    except (InputError, TypeError) as own_error:
        error = own_error
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (None if error is None else str(error), facts), group=group)
        error = error or _disagreement(found)
    if error is not None:
        raise error


def _disagreement(found: list[tuple[str | None, dict[str, Any]]]) -> InputError | None:
    for rank, (refusal, _) in enumerate(found):
        if refusal is not None:
            return InputError(f"rank {rank} of the group was refused: {refusal}")
    for name in found[0][1]:
        values = [facts[name] for _, facts in found]
        if any(value != values[0] for value in values):
            return InputError(f"{name}: expected the same on all ranks, got {values}")
    return None
