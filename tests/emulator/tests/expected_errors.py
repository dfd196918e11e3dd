"""Expects errors of the emulator. Not a test module."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from emulator import EmulatorError


@contextlib.contextmanager
def failing(kind: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[EmulatorError]]:
    """Expects an error of this kind, whose text has the pattern ``match``."""
    with pytest.raises(EmulatorError, match=match) as caught:
        yield caught
    assert caught.value.kind == kind, caught.value


def expecting(kind: str | None) -> contextlib.AbstractContextManager[object]:
    """Expects an error of this kind, or none if it is None."""
    return failing(kind) if kind else contextlib.nullcontext()


def fails(kind: str, text: str, launch: Callable[[], Any]) -> EmulatorError:
    """Returns the error of a launch, which must be of this kind and have ``text`` in it."""
    with failing(kind, re.escape(text) or None) as caught:
        launch()
    return caught.value
