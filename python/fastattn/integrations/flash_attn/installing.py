"""Puts this package where ``import flash_attn`` finds it, for code that cannot be edited."""

from __future__ import annotations

import sys
from types import ModuleType

_NAME = "flash_attn"
_OURS = __name__.rpartition(".")[0]
_SUBMODULES = ("flash_attn_interface", "bert_padding")
_displaced: dict[str, ModuleType] | None = None


def install_as_flash_attn() -> None:
    """Makes ``import flash_attn`` and ``from flash_attn.flash_attn_interface import …`` give this package.

    To be called before the code that imports it: what was imported by name earlier stays what it was. An installed
    flash-attn is out of reach until `uninstall_as_flash_attn`. Installing twice is fine. Programs that look for the
    distribution ``flash-attn`` (its metadata, by ``importlib.metadata``) instead of the module do not find one.
    """
    global _displaced
    if _displaced is not None:
        return
    _displaced = _take_out()
    sys.modules[_NAME] = sys.modules[_OURS]
    for name in _SUBMODULES:
        sys.modules[f"{_NAME}.{name}"] = sys.modules[f"{_OURS}.{name}"]


def uninstall_as_flash_attn() -> None:
    """Undoes `install_as_flash_attn`: ``flash_attn`` is what it was before. Not installed: does nothing."""
    global _displaced
    if _displaced is None:
        return
    _take_out()
    sys.modules.update(_displaced)
    _displaced = None


def _take_out() -> dict[str, ModuleType]:
    """Every module of the name, which is then to be imported anew."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
