"""Checks with ``FASTATTN_CHECK=1`` that all ranks of a group make the same call. A mistake on one rank then raises on
every rank; without the check the other ranks would wait for that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from fastattn.checks import device_checks_are_on
from fastattn.errors import InputError

_Result = TypeVar("_Result")


def checked_on_all_ranks(
    groups: Sequence[dist.ProcessGroup], check: Callable[[], tuple[_Result, dict[str, Any]]]
) -> _Result:
    """Runs ``check``, which either raises, or returns a result and, by name, the values that all ranks must share.

    ``groups`` is one process group, or the groups of a mesh in the order of its dimensions. Returns the result.
    """
    if not device_checks_are_on():
        return check()[0]
    error: Exception | None = None
    result: Any = None
    facts: dict[str, Any] = {}
    try:
        result, facts = check()
    except (InputError, TypeError) as own_error:
        error = own_error
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (None if error is None else str(error), facts), group=group)
        error = error or _disagreement(found)
    if error is not None:
        raise error
    return result


def _disagreement(found: list[tuple[str | None, dict[str, Any]]]) -> InputError | None:
    for rank, (refusal, _) in enumerate(found):
        if refusal is not None:
            return InputError(f"rank {rank} of the group was refused: {refusal}")
    for name in found[0][1]:
        values = [facts[name] for _, facts in found]
        if any(value != values[0] for value in values):
            return InputError(f"{name}: expected the same on all ranks, got, in the order of ranks, {values}")
    return None
