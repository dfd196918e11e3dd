"""Tensor-core products, with bounds for the difference between a GPU and the emulator. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_cases import HEADER


@dataclass(frozen=True)
class MatrixCase:
    """An ``mma.sync`` of one warp. ``registers``: the numbers of 32-bit registers of a, b, c and d. ``bound`` limits
    |error| / (sum of |a * b| + |c|); None: results are exact."""

    opcode: str
    kind: str  # of a and b
    sum_kind: str  # of c and d
    registers: tuple[int, int, int, int]
    bound: float | None
    target: str = "sm_80"

    def __str__(self) -> str:
        return self.opcode.removeprefix("mma.sync.aligned.")

    def ptx(self) -> str:
        a, b, c, d = self.registers
        names = [f"%r{i}" for i in range(a + b + c + d)]
        loads = "".join(f"ld.global.b32 {name}, [%rd0+{128 * i}];\n" for i, name in enumerate(names[: a + b + c]))
        stores = "".join(f"st.global.b32 [%rd1+{128 * i}], {name};\n" for i, name in enumerate(names[a + b + c :]))

        def group(first: int, count: int) -> str:
            kind = "f" if self.sum_kind == "f32" and first >= a + b else "r"
            return "{" + ", ".join(f"%{kind}{first + i}" for i in range(count)) + "}"

        into = out_of = ""
        if self.sum_kind == "f32":
            into = "".join(f"mov.b32 %f{i}, %r{i};" for i in range(a + b, a + b + c))
            out_of = "".join(f"mov.b32 %r{i}, %f{i};" for i in range(a + b + c, a + b + c + d))
        version = "7.8" if self.target == "sm_80" else "8.4"
        return f"""{HEADER.format(version=version, target=self.target)}
.visible .entry k(.param .u64 in, .param .u64 out)
{{
    .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %rd<4>;
    mov.u32 %r39, %tid.x; mul.wide.u32 %rd2, %r39, 4;
    ld.param.u64 %rd0, [in]; add.s64 %rd0, %rd0, %rd2;
    ld.param.u64 %rd1, [out]; add.s64 %rd1, %rd1, %rd2;
    {loads}{into}
    {self.opcode} {group(a + b + c, d)}, {group(0, a)}, {group(a, b)}, {group(a + b, c)};
    {out_of}
    {stores}ret;
}}"""


def matrix_cases() -> list[MatrixCase]:
    """Returns the cases. Their bounds: hardware aligns the exact products to the largest and truncates them to 24 bits
    (13 for fp8 on Hopper), so that each of k + 1 terms may lose one unit there; an f16 sum is rounded to 11 bits."""
    table: list[tuple[str, str, str, tuple[int, int, int, int], float | None, str]] = []
    for kind in ("f16", "bf16"):
        table.append(("m16n8k8", kind, "f32", (2, 1, 4, 4), 9 * 2**-23, "sm_80"))
        table.append(("m16n8k16", kind, "f32", (4, 2, 4, 4), 17 * 2**-23, "sm_80"))
    table.append(("m16n8k8", "f16", "f16", (2, 1, 2, 2), 2**-10, "sm_80"))
    table.append(("m16n8k16", "f16", "f16", (4, 2, 2, 2), 2**-10, "sm_80"))
    table.append(("m16n8k4", "tf32", "f32", (2, 1, 4, 4), 5 * 2**-23, "sm_80"))
    table.append(("m16n8k8", "tf32", "f32", (4, 2, 4, 4), 9 * 2**-23, "sm_80"))
    for kind in ("s8", "u8"):
        table.append(("m16n8k16", kind, "s32", (2, 1, 4, 4), None, "sm_80"))
        table.append(("m16n8k32", kind, "s32", (4, 2, 4, 4), None, "sm_80"))
    for kind in ("e4m3", "e5m2"):
        table.append(("m16n8k32", kind, "f32", (4, 2, 4, 4), 33 * 2**-13, "sm_89"))
    found = []
    for shape, kind, sums, registers, bound, target in table:
        opcode = f"mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind}.{sums}"
        found.append(MatrixCase(opcode, kind, sums, registers, bound, target))
    return found


MATRIX_CASES = matrix_cases()
FORMATS: dict[str, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "s8": torch.int8,
    "u8": torch.uint8,
    "s32": torch.int32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def fragments(case: MatrixCase, generator: torch.Generator, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns random registers of a, b and c, [registers, 32]. ``function`` maps the numbers before their rounding."""
    rows = []
    for count, kind in zip(case.registers, (case.kind, case.kind, case.sum_kind), strict=False):
        dtype = FORMATS[kind]
        if dtype in (torch.int8, torch.uint8, torch.int32):
            info = torch.iinfo(torch.int8 if dtype == torch.int32 else dtype)
            bytes_or_words = torch.randint(info.min, info.max, (count * 128 // dtype.itemsize,), generator=generator)
            rows.append(bytes_or_words.to(dtype).view(torch.int32).view(count, 32))
            continue
        numbers = function(torch.randn(count * 128 // dtype.itemsize, generator=generator))
        rows.append(numbers.to(dtype).view(torch.int32).view(count, 32))
    return torch.cat(rows)
