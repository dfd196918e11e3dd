"""Checks that every launch of a Triton kernel says whether products are fused with sums: Triton's default depends on
its release, and Triton warns users whose code relies on the default."""

from __future__ import annotations

import ast
from pathlib import Path

import fastattn.triton_kernels

FOLDER = Path(fastattn.triton_kernels.__file__).parent


def launches(path: Path) -> list[ast.Call]:
    """Returns the calls ``some_kernel[grid](…)`` of a file."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("kernel")
    ]


def test_each_launch_says_whether_products_are_fused_with_sums() -> None:
    found = {path.name: launches(path) for path in sorted(FOLDER.glob("*.py"))}
    assert found["decode.py"] and found["int8_matmul.py"]  # the search finds launches
    silent = [
        f"{name}:{call.lineno}"
        for name, calls in found.items()
        for call in calls
        if not {"enable_fp_fusion", None} & {keyword.arg for keyword in call.keywords}  # None: **options
    ]
    assert not silent
