"""Tests that importing fastattn imports no slow module that many programs never need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastattn.after_import import after_import

SLOW = (
    "matplotlib",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.flop_counter",
    "transformers",
    "triton",
)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def test_importing_fastattn_imports_none_of_them() -> None:
    """Modules that torch imports do not count. Packages of fastattn that are rarely needed are imported when used."""
    late = ("fastattn.distributed", "fastattn.integrations")
    code = f"""
import sys, torch
before = set(sys.modules)
import fastattn
print(*(name for name in {SLOW + late!r} if name in sys.modules and name not in before))
print(fastattn.distributed.merge_attention.__name__, fastattn.integrations.flash_attn.flash_attn_func.__name__)
print(*(name in sys.modules for name in {late!r}))
print(hasattr(fastattn, "nothing"), hasattr(fastattn.integrations, "nothing"))
"""
    lines = run(code).splitlines()
    assert lines == ["", "merge_attention flash_attn_func", "True True", "False False"]


@pytest.mark.slow
def test_the_triton_kernels_import_triton_and_none_of_the_others() -> None:
    pytest.importorskip("triton")
    code = f"""
import importlib, pkgutil, sys
import fastattn.triton_kernels
for module in pkgutil.iter_modules(fastattn.triton_kernels.__path__):
    importlib.import_module("fastattn.triton_kernels." + module.name)
print(*(name for name in {SLOW!r} if name in sys.modules))
"""
    assert run(code).split() == ["triton"]


@pytest.mark.slow
@pytest.mark.parametrize("order", [("fastattn", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "fastattn")])
def test_flops_are_counted_whatever_is_imported_first(order: tuple[str, str]) -> None:
    code = f"""
import importlib, torch
for name in {order!r}:
    importlib.import_module(name)
from torch.utils.flop_counter import flop_registry
print(*(torch.ops.fastattn.int8_matmul in flop_registry, torch.ops.fastattn_triton.attention_forward in flop_registry))
"""
    assert run(code).split() == ["True", "True"]


class TestAfterImport:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        path = tmp_path / "imported_late.py"
        path.write_text("value = 1\n")
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        return path

    def test_it_is_told_when_the_module_is_there(self, module: Path) -> None:
        seen: list[int] = []
        after_import(module.stem, lambda: seen.append(sys.modules[module.stem].value))
        assert seen == []
        __import__(module.stem)
        assert seen == [1]
        __import__(module.stem)
        assert seen == [1]

    def test_it_is_told_at_once_of_a_module_that_was_imported(self) -> None:
        seen: list[str] = []
        after_import("sys", lambda: seen.append("sys"))
        assert seen == ["sys"]

    def test_it_waits_through_an_import_that_fails(self, module: Path) -> None:
        seen: list[str] = []
        module.write_text("raise KeyError\n")
        after_import(module.stem, lambda: seen.append(module.stem))
        with pytest.raises(KeyError):
            __import__(module.stem)
        assert seen == []
        module.write_text("value = 12345\n")
        __import__(module.stem)
        assert seen == [module.stem]

    def test_the_module_is_as_if_nobody_waited(self, module: Path) -> None:
        after_import(module.stem, lambda: None)
        imported = __import__(module.stem)
        assert imported.__file__ == str(module) and imported.__spec__ is not None
        assert type(imported.__spec__.loader).__name__ == "SourceFileLoader"


@pytest.mark.slow
def test_int8_weights_are_gathered_whoever_imports_first() -> None:
    """torch makes one of DTensor's operators when it is first needed, perhaps after fastattn was imported."""
    code = """
import fastattn, torch
from torch import nn
from torch.distributed import _functional_collectives
model = nn.Sequential(nn.Linear(16, 16))
fastattn.nn.quantize_model(model)
wrap = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
print("absent" if wrap is None else tuple(wrap(model[0].weight).shape))
"""
    assert run(code).strip().splitlines()[-1] in ("(16, 16)", "absent")  # torch 2.10 has no such operator
