"""Replaces ``torch.nn.functional.scaled_dot_product_attention`` with fastattn's function, and restores it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastattn.functional.sdpa import scaled_dot_product_attention
from fastattn.functional.torch_sdpa import torch_sdpa
from fastattn.namespace import PACKAGE

_lock = threading.Lock()
_installed = False
_users = 0  # the number of active patch_sdpa() blocks, plus one if install() is in force
_sdpa_before = torch_sdpa
_mha_fastpath_before = True


def install() -> None:
    """Replaces ``F.scaled_dot_product_attention`` with fastattn's function for the whole process, until
    ``uninstall()``. A second call does nothing.

    It also turns off the fused fast path of ``nn.MultiheadAttention``, so that this module calls the replacement if
    ``need_weights=False``. Modules that imported torch's function by name keep using it; ``missed_modules()`` lists
    such modules.
    """
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            _put_in_place()


def uninstall() -> None:
    """Undoes ``install()``; the original function is restored once no ``patch_sdpa()`` block is active.

    Raises RuntimeError if ``install()`` is not in force.
    """
    global _installed
    with _lock:
        if not _installed:
            raise RuntimeError("uninstall: no install() is in force; one uninstall() undoes all install() calls")
        _installed = False
        _take_out()


@contextlib.contextmanager
def patch_sdpa() -> Iterator[None]:
    """Replaces ``F.scaled_dot_product_attention`` with fastattn's function inside a ``with`` block, as ``install()``
    does. The switch applies to the whole process: other threads see it too. Blocks nest.

    For training with checkpointing use ``install()``, because the ``with`` block has usually ended when backward
    recomputes the forward.
    """
    with _lock:
        _put_in_place()
    try:
        yield
    finally:
        with _lock:
            _take_out()


def missed_modules() -> list[str]:
    """Returns the names, ``"package.module.attribute"``, under which loaded modules hold torch's function.

    ``install()`` and ``patch_sdpa()`` do not reach these modules, because they imported the function by name or kept it
    as an attribute. Import the modules inside the block or after ``install()``, set the attribute to
    ``fastattn.scaled_dot_product_attention``, or see ``fastattn.integrations.torch_flash``. References in objects and
    closures are not searched.
    """
    own = {"torch._C._nn", "torch.nn.functional"}  # where it is defined, and where it is replaced
    found = []
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", None)  # getattr(module, name) would make lazy modules import
        if isinstance(held, dict) and name not in own and not f"{name}.".startswith(f"{PACKAGE}."):
            found += [f"{name}.{attribute}" for attribute, value in list(held.items()) if value is torch_sdpa]
    return sorted(found)


def _put_in_place() -> None:
    global _users, _sdpa_before, _mha_fastpath_before
    _users += 1
    if _users == 1:
        _sdpa_before = F.scaled_dot_product_attention
        _mha_fastpath_before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


def _take_out() -> None:
    global _users
    _users -= 1
    if _users == 0:
        F.scaled_dot_product_attention = _sdpa_before
        torch.backends.mha.set_fastpath_enabled(_mha_fastpath_before)
