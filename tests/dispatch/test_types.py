"""What a type checker makes of ``return_lse``: it decides between one tensor and two."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest
from torch import Tensor

import fastattn


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is younger")
@pytest.mark.parametrize("function", [fastattn.attention, fastattn.attention_varlen, fastattn.attention_with_kv_cache])
def test_return_lse_decides_the_type_of_the_result(function: Callable[..., Any]) -> None:
    hints = [typing.get_type_hints(overload) for overload in typing.get_overloads(function)]
    own = typing.get_type_hints(function)
    assert [(hint["return_lse"], hint["return"]) for hint in hints] == [
        (Literal[False], Tensor),
        (Literal[True], tuple[Tensor, Tensor]),
        (bool, Tensor | tuple[Tensor, Tensor]),
    ]
    for hint in hints:
        others = {name: kind for name, kind in hint.items() if name not in ("return_lse", "return")}
        assert others == {name: kind for name, kind in own.items() if name not in ("return_lse", "return")}
