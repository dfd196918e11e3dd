"""Tests ``install_as_flash_attn``: code that imports flash_attn gets fastattn's functions, until it is uninstalled."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import fastattn.integrations.flash_attn as ours


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    ours.uninstall_as_flash_attn()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_every_way_to_import_it() -> None:
    ours.install_as_flash_attn()
    ours.install_as_flash_attn()
    namespace: dict[str, object] = {}
    exec(
        "import flash_attn\n"
        "from flash_attn import flash_attn_func\n"
        "from flash_attn.bert_padding import pad_input, unpad_input, index_first_axis\n"
        "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward\n",
        namespace,
    )
    assert namespace["flash_attn"] is ours
    assert namespace["flash_attn_func"] is ours.flash_attn_func
    assert namespace["pad_input"] is ours.bert_padding.pad_input
    assert importlib.import_module("flash_attn.flash_attn_interface") is ours.flash_attn_interface
    assert importlib.util.find_spec("flash_attn") is not None
    assert ours.__version__.startswith("2.8.")


def test_uninstalling_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, their_part = ModuleType("flash_attn"), ModuleType("flash_attn.ops")
    monkeypatch.setitem(sys.modules, "flash_attn", theirs)
    monkeypatch.setitem(sys.modules, "flash_attn.ops", their_part)
    ours.install_as_flash_attn()
    assert sys.modules["flash_attn"] is ours and "flash_attn.ops" not in sys.modules
    ours.uninstall_as_flash_attn()
    ours.uninstall_as_flash_attn()
    assert sys.modules["flash_attn"] is theirs and sys.modules["flash_attn.ops"] is their_part
    assert "flash_attn.bert_padding" not in sys.modules


def test_without_an_installed_one_it_is_gone_again() -> None:
    ours.install_as_flash_attn()
    ours.uninstall_as_flash_attn()
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn")
