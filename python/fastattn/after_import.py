"""Runs callbacks after other code has imported a module, so that fastattn does not have to import that module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(module: str, then: Callable[[], None]) -> None:
    """Calls ``then`` as soon as ``module`` has been imported, or now if ``module`` is already imported.

    If the import fails, ``then`` stays registered for the next attempt.
    """
    if module in sys.modules:
        then()
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(module, []).append(then)


class _Finder(MetaPathFinder):
    """Finds a module with the other finders of ``sys.meta_path``, and makes the module's loader run the callbacks."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for then in _waiting.pop(fullname, ()):
                then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
