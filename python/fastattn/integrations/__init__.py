"""Integrates fastattn with code written for other packages. Each integration imports its package on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports an integration when it is first used. Raises ImportError if the other package is missing."""
        if name in ("dtensor", "flash_attn", "torch_flash", "transformers"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
