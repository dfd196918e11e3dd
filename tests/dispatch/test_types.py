"""Tests the overloads: ``return_lse`` and ``return_max_logit`` decide how many tensors a type checker sees returned."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest
from torch import Tensor

import fastattn

needs_overloads = pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is younger")


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of the parameters and result, with the entries of ``**options`` one by one."""
    hints = typing.get_type_hints(function)
    options = hints.pop("options", None)
    if options is None:
        return hints
    (options,) = typing.get_args(options)
    kind = typing.get_origin(options)
    chosen = dict(zip(kind.__parameters__, typing.get_args(options), strict=True))
    return hints | {name: chosen.get(hint, hint) for name, hint in typing.get_type_hints(kind).items()}


@needs_overloads
def test_return_lse_decides_the_type_of_the_result() -> None:
    function = fastattn.attention_with_kv_cache
    own, hints = hints_of(function), [hints_of(overload) for overload in typing.get_overloads(function)]
    assert [(hint["return_lse"], hint["return"]) for hint in hints] == [
        (Literal[False], Tensor),
        (Literal[True], tuple[Tensor, Tensor]),
        (bool, Tensor | tuple[Tensor, Tensor]),
    ]
    for hint in hints:
        assert dropped(hint, "return_lse", "return") == dropped(own, "return_lse", "return")


@needs_overloads
@pytest.mark.parametrize("function", [fastattn.attention, fastattn.attention_varlen])
def test_two_options_decide_the_type_of_the_result(function: Callable[..., Any]) -> None:
    own, hints = hints_of(function), [hints_of(overload) for overload in typing.get_overloads(function)]
    assert [(hint["return_lse"], hint["return_max_logit"], hint["return"]) for hint in hints] == [
        (Literal[False], Literal[False], Tensor),
        (Literal[True], Literal[False], tuple[Tensor, Tensor]),
        (Literal[False], Literal[True], tuple[Tensor, Tensor]),
        (Literal[True], Literal[True], tuple[Tensor, Tensor, Tensor]),
        (bool, bool, Tensor | tuple[Tensor, ...]),
    ]
    for hint in hints:
        deciding = ("return_lse", "return_max_logit", "return")
        assert dropped(hint, *deciding) == dropped(own, *deciding)


def dropped(hints: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: kind for name, kind in hints.items() if name not in (*names, "unknown")}
