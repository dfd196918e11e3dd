"""Pairs instances with a few values of a parameter each, where all combinations would take too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def in_turn(instances: Iterable[tuple[Any, ...]], values: Sequence[Any], each: int = 1) -> list[tuple[Any, ...]]:
    """Returns each instance with ``each`` of the values appended.

    It takes the values that have met the instance's own values least, so that few instances cover all pairs.
    """
    met: Counter[Any] = Counter()
    found = []
    for instance in instances:
        own = [(place, str(value)) for place, value in enumerate(instance)]
        order = sorted(range(len(values)), key=lambda i: (max(met[i, of] for of in own), met[i], i))
        for i in order[:each]:
            met.update([i, *((i, of) for of in own)])
            found.append((*instance, values[i]))
    return found
