"""The doors for code that was written against other packages. Each imports its package only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a door when it is used first. Raises ImportError where what it needs is not installed."""
        if name in ("dtensor", "flash_attn", "torch_flash", "transformers"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
