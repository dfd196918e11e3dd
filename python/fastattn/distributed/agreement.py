"""Checks that all ranks of a group make the same call, if ``FASTATTN_CHECK=1``.

A mistake on one rank then raises an error on every rank. Without the check, only the rank with the mistake raises an
error, and the other ranks wait for this rank in a collective.
"""

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
    """Runs ``check`` and returns its result. With ``FASTATTN_CHECK=1``, also compares the calls of all ranks.

    ``check`` either raises an error, or returns a result and a dict of the values that must be equal on all ranks.
    ``groups`` holds one process group, or the groups of a mesh in the order of the mesh's dimensions.
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
            return InputError(f"rank {rank} of the group raised an error: {refusal}")
    for name in found[0][1]:
        values = [facts[name] for _, facts in found]
        if any(value != values[0] for value in values):
            return InputError(f"{name}: expected the same on all ranks, got (in the order of ranks) {values}")
    return None
