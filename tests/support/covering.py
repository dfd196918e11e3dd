"""Chooses the tests of ``make test`` and ``make test-all``: few cases of each function, those that cover the most.

A case has a set of *facts*: that a parameter has a value, where each entry of a dataclass or a dict counts as a
parameter. In tests of instances (`PAIRWISE` words in the name, or `PAIRWISE_MODULES`), a fact is that two parameters
have two values. The chosen cases cover all facts, or are at most a few cases of a function whose cases are slow.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
PAIRWISE = ("each_instance", "every_instance", "every_tile")
PAIRWISE_MODULES = ("test_every_instance", "test_every_option")
PROVES_ALL = "all_kernels"  # the folder whose tests run each kernel and each option of both backends
MOST = 2  # cases of a function in the core, where a case is slow
MOST_OF_OTHERS = 1  # cases in `make test-all` of a function that the core leaves out, where a case is slow
CHEAP = ("machine_code", "packages")  # folders whose cases are fast
COMPILES = "test_triton_compile"  # the prefix of modules in those folders whose cases are slow
PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def covering(cases: Sequence[T], facts: Sequence[frozenset[Hashable]], most: int | None = None) -> list[T]:
    """Returns cases that together have the facts of all, at most ``most``. Each step adds the case with the most new
    facts."""
    missing = frozenset().union(*facts)
    chosen: set[int] = set()
    while missing and len(chosen) != most:
        best = max(range(len(cases)), key=lambda index: len(facts[index] & missing))
        chosen.add(best)
        missing -= facts[best]
    return [cases[index] for index in sorted(chosen)]


def facts_of(parameters: dict[str, Any], indices: dict[str, int]) -> frozenset[Hashable]:
    """Returns the facts of one case: the values of its parameters, or of their entries.

    ``indices`` are the positions of the values in their lists, which stand for values that cannot be compared. A seed
    is no fact: another seed repeats the test.
    """
    return frozenset(
        (name, *entry)
        for name, value in parameters.items()
        for entry in _entries(value, indices[name])
        if "seed" not in (name, entry[0])
    )


def pairs_of(
    parameters: dict[str, Any], indices: dict[str, int], rows: Iterable[tuple[str, ...]]
) -> frozenset[Hashable]:
    """Returns the facts of one case of a test of instances: each pair of its values, or its only value.

    ``rows``: names of parameters whose values were given together; they count as one value here.
    """
    single = {name: (name,) for name in parameters}
    for names in rows:
        single |= dict.fromkeys(names, names)
    values = [
        (names, tuple(_comparable(parameters[name], indices[name]) for name in names))
        for names in sorted(set(single.values()))
        if names != ("seed",)
    ]
    return frozenset(itertools.combinations(values, 2) if len(values) > 1 else values)


def _entries(value: Any, index: int) -> Iterable[tuple[Hashable, ...]]:
    """Yields the name and value of each entry of a dataclass or a dict; of another value, the value alone."""
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


def _function(item: Any) -> tuple[str, ...]:
    """Returns the names of a test's module, function and family of kernels: each value of a parameter ``kernels``
    counts as a function of its own."""
    families = [value for name, value in _parameters(item).items() if name == "kernels"]
    return item.parent.nodeid, getattr(item, "originalname", None) or item.name, *families


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _backend(item: Any) -> Any:
    return _parameters(item).get("backend")


def _rows_of(item: Any) -> list[tuple[str, ...]]:
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [tuple(each.replace(",", " ").split()) if isinstance(each, str) else tuple(each) for each in given]
    return [row for row in names if set(row) <= set(item.callspec.params)]


def _has_instances(item: Any) -> bool:
    module, name, *_ = _function(item)
    return Path(module).stem in PAIRWISE_MODULES or any(word in name for word in PAIRWISE)


def _quick(items: Sequence[Any]) -> list[Any]:
    """Returns the pytest items from which the core is chosen."""
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    on_others = {_function(item) for item in quick if _backend(item) not in (None, "triton")}
    return [
        item
        for item in quick
        if _backend(item) != "triton" or item.path.parent.name == PROVES_ALL or _function(item) not in on_others
    ]


def core_of(items: Iterable[Any]) -> list[Any]:
    """Returns the pytest items of ``make test``: few cases of each function, and none that is marked ``slow``. Tests of
    several backends leave out Triton's cases, which compile for seconds: `PROVES_ALL` runs each Triton kernel and
    option."""
    return _few_of(_quick(list(items)), lambda item: MOST if _is_dear(item) else None)


def few_of(items: Iterable[Any]) -> list[Any]:
    """Returns the pytest items of ``make test-all``: of a function of the core up to twice as many cases, of any other
    function one case if its cases are slow."""
    items = list(items)
    quick = set(map(id, _quick(items)))

    def most_of(item: Any) -> int | None:
        if id(item) in quick:
            return 2 * MOST if _is_dear(item) else None
        is_cheap = item.path.parent.name in CHEAP and not item.path.stem.startswith(COMPILES)
        return None if is_cheap else MOST_OF_OTHERS

    return _few_of(items, most_of)


def _is_dear(item: Any) -> bool:
    """Returns whether a case of the core is slow, and not there to prove an instance or an option."""
    has_proofs = item.path.parent.name == PROVES_ALL or _has_instances(item)
    return not has_proofs and item.get_closest_marker("quick") is None


def _few_of(items: list[Any], most_of: Callable[[Any], int | None]) -> list[Any]:
    """Returns few cases of each function: at most ``most_of`` its items."""
    functions: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        functions.setdefault((*_function(item), most_of(item)), []).append(item)
    chosen: list[Any] = []
    for (*_, most), cases in functions.items():
        if not hasattr(cases[0], "callspec"):
            chosen += cases
            continue
        specs = [case.callspec for case in cases]
        if _has_instances(cases[0]):
            facts = [
                pairs_of(each.params, each.indices, _rows_of(case)) for each, case in zip(specs, cases, strict=True)
            ]
        else:
            facts = [facts_of(each.params, each.indices) for each in specs]
        chosen += covering(cases, facts, most) if any(facts) else cases[:1]
    return chosen


def part_of(items: Iterable[Any], part: str) -> list[Any]:
    """Returns the ``"K/N"``-th subset of the items. Cases of one function, or of one xdist_group, stay together."""
    number, parts = map(int, part.split("/"))

    def key(item: Any) -> str:
        group = item.get_closest_marker("xdist_group")
        return group.args[0] if group else "::".join(_function(item))

    return [item for item in items if zlib.crc32(key(item).encode()) % parts == number - 1]
