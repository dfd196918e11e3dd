"""Whether all ranks of a group make the same call: asked with ``FASTATTN_CHECK=1``. A mistake on one of them is then an
error on every rank, where it would make the others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fastattn.checks import device_checks_are_on
from fastattn.errors import InputError


def checked_on_all_ranks(groups: Sequence[dist.ProcessGroup], check: Callable[[], dict[str, Any]]) -> None:
    """Runs ``check``, which raises, or returns what has to be the same on all ranks, by name. ``groups``: those of one
    mesh, a dimension after the other, where there is more than one."""
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
        values = [of_rank[name] for _, of_rank in found]
        if any(value != values[0] for value in values):
            return InputError(f"{name}: expected the same on all ranks, got {values}")
    return None
