"""Replaces fastattn's argument names in errors by the names that another package's functions use."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from fastattn.errors import InputError

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TRANSPOSED = "; these shapes are after transpose(1, 2) of the layout that you pass, "
_ORIGINAL = {"[B, H": "[B, S, H, D]", "[num_pages, H": "[num_pages, page_size, H, D]"}  # in an error → as passed


def errors_name(**theirs: str) -> Callable[[_Function], _Function]:
    """Decorates a function: its errors name each argument ``theirs[name]`` where fastattn would write ``name``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (InputError, TypeError) as error:
                name, colon, text = str(error).partition(": ")
                name, bracket, index = name.partition("[")  # of a name such as "window[0]"
                if not colon or name not in theirs:
                    raise
                layout = re.search(r"\[(B|num_pages), H", text.partition("; ")[0])  # not in the advice after ";"
                note = _TRANSPOSED + _ORIGINAL[layout[0]] if layout and _TRANSPOSED not in text else ""
                for ours, own in theirs.items():  # a word such as "value" is an argument only before "." or "["
                    end = r"\b" if "_" in ours or len(ours) == 1 else r"(?=\.\w|\[)"
                    text = re.sub(rf"\b{ours}{end}", own, text)
                raise type(error)(f"{theirs[name]}{bracket}{index}: {text}{note}") from error

        return named  # type: ignore[return-value]

    return decorate
