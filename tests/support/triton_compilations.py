"""Counts what Triton has compiled."""

from __future__ import annotations

from typing import Any


def num_compiled(kernel: Any) -> int:
    """Returns how many variants of a jitted kernel this process has compiled or loaded, for all devices."""
    return sum(len(variants) for variants, *_ in kernel.device_caches.values())
