"""Makes ``import flash_attn`` find this package, for code that cannot be edited."""

from __future__ import annotations

import sys
from types import ModuleType

_NAME = "flash_attn"
_OURS = __name__.rpartition(".")[0]
_SUBMODULES = ("flash_attn_interface", "bert_padding")
_displaced: dict[str, ModuleType] | None = None


def install_as_flash_attn() -> None:
    """Makes ``import flash_attn`` and ``from flash_attn.flash_attn_interface import …`` use this package.

    Call this function before other code imports ``flash_attn``: names that were imported earlier do not change. An
    installed flash-attn cannot be imported until `uninstall_as_flash_attn`. A second call does nothing. Programs that
    look for the distribution ``flash-attn`` (by ``importlib.metadata``) instead of the module do not find it.
    """
    global _displaced
    if _displaced is not None:
        return
    _displaced = _take_out()
    sys.modules[_NAME] = sys.modules[_OURS]
    for name in _SUBMODULES:
        sys.modules[f"{_NAME}.{name}"] = sys.modules[f"{_OURS}.{name}"]


def uninstall_as_flash_attn() -> None:
    """Undoes `install_as_flash_attn`: ``flash_attn`` is what it was before. Without an install it does nothing."""
    global _displaced
    if _displaced is None:
        return
    _take_out()
    sys.modules.update(_displaced)
    _displaced = None


def _take_out() -> dict[str, ModuleType]:
    """Removes ``flash_attn`` and its submodules from ``sys.modules``, and returns them. The next import loads them."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
