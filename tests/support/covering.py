"""Chooses the tests of ``make test``: few cases of each function, which together have every value of each parameter.

Not a test module. A case is a set of *facts*: that a parameter has a value; for tests of instances (`PAIRWISE` words in
the name), that two parameters have two values. Where a value is a dataclass or a dict, each of its entries is a
parameter. What is kept has all facts of all cases.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
PAIRWISE = ("each_instance", "every_instance", "every_tile")
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
    """Returns what one case tests.

    ``indices``: the place of each value in its list, for values that do not compare. A seed is no fact: another one
    repeats the test.
    """
    facts = {
        (name, *entry)
        for name, value in parameters.items()
        for entry in ([(_comparable(value, indices[name]),)] if is_pairwise else _entries(value, indices[name]))
        if "seed" not in (name, entry[0])
    }
    return frozenset(itertools.combinations(sorted(facts, key=str), 2) if is_pairwise and len(facts) > 1 else facts)


def _entries(value: Any, index: int) -> Iterable[tuple[Hashable, ...]]:
    """Yields the names and values of what a dataclass or a dict holds; of other values, the value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict) and value:
        yield from ((str(name), _comparable(each, index)) for name, each in value.items())
    else:
        yield (_comparable(value, index),)


def _comparable(value: Any, index: int) -> Hashable:
    return (type(value), value) if _is_plain(value) else index


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
    """Returns the ``"K/N"``-th part of the items. Cases of a function stay together, and what an xdist_group shares."""
    number, parts = map(int, part.split("/"))

    def key(item: Any) -> str:
        group = item.get_closest_marker("xdist_group")
        return group.args[0] if group else "::".join(_function(item))

    return [item for item in items if zlib.crc32(key(item).encode()) % parts == number - 1]
