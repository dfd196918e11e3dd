"""Values of a parameter that take turns, where each with each would cost more than it tells. Not a test module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def in_turn(instances: Iterable[tuple[Any, ...]], values: Sequence[Any], each: int = 1) -> list[tuple[Any, ...]]:
    """Each instance with ``each`` of the values behind it.

    Those are taken that have met the instance's own values least: so each value soon meets each of these.
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
