"""Chooses the tests of ``make test``: few cases of each function, which together have every value of each parameter.

Not a test module. A case is a set of *facts*: that a parameter has a value; for tests of instances (``each_instance``
or ``every_instance`` in the name), that two parameters have two values. What is kept has all facts of all cases.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
PAIRWISE = ("each_instance", "every_instance")
PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def covering(cases: Sequence[T], facts: Sequence[frozenset[Hashable]]) -> list[T]:
    """Returns cases whose facts are the facts of all, in their order: each time the case with most new facts."""
    missing = frozenset().union(*facts)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(facts[index] & missing))
        chosen.add(best)
        missing -= facts[best]
    return [cases[index] for index in sorted(chosen)]


def facts_of(parameters: dict[str, Any], indices: dict[str, int], is_pairwise: bool) -> frozenset[Hashable]:
    """Returns what one case tests. ``indices``: the place of each value in its list, for values that do not compare.

    A seed is no fact: another one repeats the test.
    """
    values = [
        (name, (type(value), value) if _is_plain(value) else indices[name])
        for name, value in sorted(parameters.items())
        if name != "seed"
    ]
    return frozenset(itertools.combinations(values, 2) if is_pairwise and len(values) > 1 else values)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, PLAIN)


def _function(item: Any) -> tuple[str, str]:
    return item.parent.nodeid, getattr(item, "originalname", item.name)


def core_of(items: Iterable[Any]) -> list[Any]:
    """Returns the pytest items of ``make test``: none that is marked ``slow``, and few of each function."""
    functions: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions.setdefault(_function(item), []).append(item)
    chosen: list[Any] = []
    for (_, name), cases in functions.items():
        if not hasattr(cases[0], "callspec"):
            chosen += cases
            continue
        is_pairwise = any(word in name for word in PAIRWISE)
        facts = [facts_of(case.callspec.params, case.callspec.indices, is_pairwise) for case in cases]
        chosen += covering(cases, facts) if any(facts) else cases[:1]
    return chosen


def part_of(items: Iterable[Any], part: str) -> list[Any]:
    """Returns the ``"K/N"``-th part of the items. It parts no function: its cases may share what they compile."""
    number, parts = map(int, part.split("/"))
    return [item for item in items if zlib.crc32("::".join(_function(item)).encode()) % parts == number - 1]
