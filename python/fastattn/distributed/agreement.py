"""Whether all ranks of a group make the same call: asked with ``FASTATTN_CHECK=1``. A mistake on one of them is then an
error on every rank, where it would make the others wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fastattn.checks import device_checks_are_on
from fastattn.errors import InputError


def checked_on_all_ranks(group: dist.ProcessGroup, check: Callable[[], dict[str, Any]]) -> None:
    """Runs ``check``, which raises, or returns what has to be the same on all ranks, by name."""
    if not device_checks_are_on():
        check()
        return
    own_error, facts = None, {}
    try:
        facts = check()
    except (InputError, TypeError) as error:
        own_error = error
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (None if own_error is None else str(own_error), facts), group=group)
    if own_error is not None:
        raise own_error
    for rank, (refusal, _) in enumerate(found):
        if refusal is not None:
            raise InputError(f"rank {rank} of the group was refused: {refusal}")
    for name in facts:
        values = [of_rank[name] for _, of_rank in found]
        if any(value != values[0] for value in values):
            raise InputError(f"{name}: expected the same on all ranks, got {values}")
