"""Puts the drop-in in place of ``torch.nn.functional.scaled_dot_product_attention``, and takes it out again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastattn.functional.attention import torch_sdpa
from fastattn.functional.sdpa import scaled_dot_product_attention

_lock = threading.Lock()
_installed = 0
_sdpa_before = torch_sdpa
_mha_fastpath_before = True


def install() -> None:
    """Replace ``F.scaled_dot_product_attention`` for the whole process, until as many ``uninstall()`` calls.

    ``nn.MultiheadAttention``'s fused fast path is off meanwhile, so that it too comes here when it needs no weights.
    Modules that imported the function by name earlier keep torch's: they are out of reach.
    """
    global _installed, _sdpa_before, _mha_fastpath_before
    with _lock:
        _installed += 1
        if _installed == 1:
            _sdpa_before = F.scaled_dot_product_attention
            _mha_fastpath_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


def uninstall() -> None:
    """Undo one ``install()``; the last puts back what was there before. Raises RuntimeError where none is in force."""
    global _installed
    with _lock:
        if _installed == 0:
            raise RuntimeError("uninstall: expected an install() before it, got none in force")
        _installed -= 1
        if _installed == 0:
            F.scaled_dot_product_attention = _sdpa_before
            torch.backends.mha.set_fastpath_enabled(_mha_fastpath_before)


@contextlib.contextmanager
def patch_sdpa() -> Iterator[None]:
    """``install()`` for a ``with`` block. It is one switch for the process: other threads see it too, and blocks nest.

    For training with checkpointing use ``install()``: the block is over when backward recomputes the forward.
    """
    install()
    try:
        yield
    finally:
        uninstall()
