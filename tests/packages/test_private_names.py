"""Tests that torch has the names beginning with an underscore that we use: no release guarantees them.

`make test-cuda` runs this under torch's CUDA build, of any release that TORCH names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.config

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "python").rglob("*.py"), *(ROOT / "triton_kernels").glob("*.py")]


def chain(node: ast.expr, known: dict[str, str]) -> str | None:
    """Returns ``"torch._C.name"`` for such an expression. ``known`` maps the file's other names to their meaning."""
    if isinstance(node, ast.Name):
        return "torch" if node.id == "torch" else known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = chain(node.value, known)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def private_names(source: str) -> Iterator[str]:
    known: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if "._" in known[alias.asname or alias.name]:
                    yield known[alias.asname or alias.name]
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found = chain(node.value, known)
            if found is not None and found.startswith("torch"):
                known[node.targets[0].id] = found
    for node in ast.walk(tree):
        found = chain(node, known) if isinstance(node, ast.Attribute) else None
        if found is not None and "._" in found:
            yield found


def test_private_names_are_found() -> None:
    source = "import torch\nfrom torch._C import _x\nc = torch._C\nc._y()\nif torch._C._z.w: torch.nn.f()\n"
    assert {"torch._C._x", "torch._C._y", "torch._C._z.w"} <= set(private_names(source))


@pytest.mark.parametrize("name", sorted({name for file in FILES for name in private_names(file.read_text())}))
def test_torch_has_the_name(name: str) -> None:
    found = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"torch {torch.__version__} has no {name}"
        found = getattr(found, part)
