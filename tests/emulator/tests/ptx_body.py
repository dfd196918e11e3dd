"""Runs kernels of a few lines of PTX for the emulator's tests. Not a test module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulator import Module, Report


def run(
    body: str, *tensors: Tensor, threads: int = 32, functions: str = "", target: str = "sm_80", **options: Any
) -> Report:
    """Runs the body. %rd0, %rd1, … hold the tensors' addresses, %r0 the thread's index, and %rd9 4 times the index."""
    loads = "".join(f"ld.param.u64 %rd{i}, [p{i}];\n" for i in range(len(tensors)))
    module = Module(f""".version 8.0\n.target {target}\n.address_size 64
{functions}
.visible .entry k({", ".join(f".param .u64 p{i}" for i in range(len(tensors)))})
{{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .f64 %d<9>; .reg .b64 %rd<20>;
    {loads}
    mov.u32 %r0, %tid.x; mul.wide.u32 %rd9, %r0, 4;
    {body}
    ret;
}}""")
    return module.launch("k", options.pop("grid", (1,)), (threads,), tensors, **options)


def evaluate(body: str, dtype: torch.dtype, *sources: Tensor, target: str = "sm_80", **options: Any) -> Tensor:
    """Runs the body for each element of the sources, which are in %a, %b, %c and %e, and returns what it leaves in %d.

    Registers are untyped, with the width of the elements. The body may use %p<4>, %h<9> (16 bits), %t<9> (32 bits) and
    %l<9> (64 bits). %i is the thread's index.
    """
    count = len(sources[0])
    out = torch.zeros(count, dtype=dtype)
    names = "abce"[: len(sources)]
    moved = [(f"%{name}", source) for name, source in zip(names, sources, strict=True)]
    declared = "".join(f".reg .b{8 * t.element_size()} {name};" for name, t in [*moved, ("%d", out)])
    loads = "".join(
        f"ld.param.u64 %l0, [p{i}]; mad.wide.u32 %l0, %i, {t.element_size()}, %l0; "
        f"ld.global.b{8 * t.element_size()} {name}, [%l0];\n"
        for i, (name, t) in enumerate(moved)
    )
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(sources) + 1))
    module = Module(f""".version 8.0\n.target {target}\n.address_size 64
.visible .entry k({parameters})
{{
    .reg .pred %p<4>; .reg .b16 %h<9>; .reg .b32 %t<9>, %i; .reg .b64 %l<9>; {declared}
    mov.u32 %i, %tid.x;
    {loads}
    {body}
    ld.param.u64 %l0, [p{len(sources)}]; mad.wide.u32 %l0, %i, {out.element_size()}, %l0;
    st.global.b{8 * out.element_size()} [%l0], %d;
    ret;
}}""")
    for start in range(0, count, 1024):
        tensors = [tensor[start : start + 1024] for tensor in (*sources, out)]
        module.launch("k", (1,), (len(tensors[-1]),), tensors, **options)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Returns True if the tensors are equal bit for bit; all NaNs count as equal."""
    both = a.isnan() & b.isnan()
    return torch.equal(a.signbit() & ~both, b.signbit() & ~both) and torch.equal(
        a.masked_fill(both, 0), b.masked_fill(both, 0)
    )
