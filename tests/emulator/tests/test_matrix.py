"""Tests of mma.sync: exact sums of small integers, with fragment layouts written out from the manual's figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ptx_body import run

Place = Callable[[int, int], tuple[int, int]]  # (lane, element) to (row, column)
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f32": torch.float32,
    "f64": torch.float64,
}
BITS = {"s32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1} | {
    kind: 8 * dtype.itemsize for kind, dtype in DTYPES.items()
}


def bits_of(value: float, kind: str) -> int:
    """Returns the bits of an element as an unsigned integer."""
    if kind in DTYPES:
        tensor = torch.tensor([value], dtype=DTYPES[kind])
        return int.from_bytes(tensor.view(torch.uint8).numpy().tobytes(), "little")
    return int(value) % (1 << BITS[kind])


def fragment(matrix: Tensor, kind: str, place: Place, count: int) -> list[list[int]]:
    """Returns the fragment's registers, [register][lane], with elements from the lowest bits on."""
    width, bits = (64 if kind == "f64" else 32), BITS[kind]
    each = width // bits
    registers = [[0] * 32 for _ in range(count // each)]
    for lane in range(32):
        for i in range(count):
            registers[i // each][lane] |= bits_of(matrix[place(lane, i)].item(), kind) << bits * (i % each)
    return registers


def multiply(opcode: str, kinds: str, matrices: list[Tensor], places: list[Place]) -> Tensor:
    """Runs an mma of A, B and C, and returns D. ``kinds``, ``places``: types and positions of a lane's elements."""
    *sources, to = kinds.split()
    counts = [matrix.numel() // 32 for matrix in (*matrices, matrices[2])]
    tensors, declared, loads, operands = [], "", "", []
    for index, (matrix, kind) in enumerate(zip(matrices, sources, strict=True)):
        width = 64 if kind == "f64" else 32
        registers = fragment(matrix, kind, places[index], counts[index])
        half = 1 << width - 1
        signed = [[(x + half) % (2 * half) - half for x in row] for row in registers]
        tensors.append(torch.tensor(signed, dtype=torch.int64 if width == 64 else torch.int32))
        names = [f"%x{index}_{i}" for i in range(len(registers))]
        declared += f".reg .b{width} {', '.join(names)};"
        operands.append("{" + ", ".join(names) + "}")
        for i, name in enumerate(names):
            loads += f"mad.wide.u32 %rd10, %r0, {width // 8}, %rd{index};"
            loads += f"ld.global.b{width} {name}, [%rd10+{i * 4 * width}];"
    width = 64 if to == "f64" else 32
    per_register = width // BITS[to]
    results = [f"%y{i}" for i in range(counts[3] // per_register)]
    out = torch.zeros(len(results), 32, dtype=torch.int64 if width == 64 else torch.int32)
    stores = f"mad.wide.u32 %rd10, %r0, {width // 8}, %rd3;"
    stores += "".join(f"st.global.b{width} [%rd10+{i * 4 * width}], {name};" for i, name in enumerate(results))
    declared += f".reg .b{width} {', '.join(results)};"
    body = f"{declared} {loads} {opcode} {{{', '.join(results)}}}, {', '.join(operands)}; {stores}"
    report = run(body, *tensors, out, target="sm_90")
    assert sum(operations.instructions for operations in report.tensor_core.values()) == 1
    shape = matrices[2].shape
    elements = out.view({"f16": torch.float16, "f32": torch.float32, "f64": torch.float64}.get(to, torch.int32))
    elements = elements.view(len(results), 32, per_register)
    product = torch.full(shape, torch.nan, dtype=torch.float64)
    for lane in range(32):
        for i in range(counts[3]):
            product[places[3](lane, i)] = elements[i // per_register, lane, i % per_register].item()
    return product


def values(kind: str, *shape: int, seed: int) -> Tensor:
    """Returns small random integers, so that all sums are exact."""
    low, high = {"b1": (0, 2), "u4": (0, 16), "s4": (-8, 8), "u8": (0, 256), "s8": (-128, 128)}.get(kind, (-8, 9))
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).double()


def places_of(m: int, kind: str) -> list[Place]:
    """Returns the positions of a lane's elements of A, B, C and D. ``kind``: the type of A and B."""
    each = (64 if kind == "f64" else 32) // BITS[kind]

    def place_a(lane: int, i: int) -> tuple[int, int]:
        register, element = divmod(i, each)
        row, column = lane // 4, (lane % 4) * each + element
        if m == 16:
            row += 8 * (register % 2)
            register //= 2
        return row, column + 4 * each * register

    def place_b(lane: int, i: int) -> tuple[int, int]:
        register, element = divmod(i, each)
        return (lane % 4) * each + element + 4 * each * register, lane // 4

    def place_c(lane: int, i: int) -> tuple[int, int]:
        return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2

    return [place_a, place_b, place_c, place_c]


FP8 = ("e4m3", "e5m2")
SHAPES = [
    *[(16, k, "f16", "f16", sums) for k in (8, 16) for sums in ("f32", "f16")],
    *[(16, k, "bf16", "bf16", "f32") for k in (8, 16)],
    *[(16, k, "tf32", "tf32", "f32") for k in (4, 8)],
    *[(16, k, a, b, sums) for a in FP8 for b in FP8 for k in (16, 32) for sums in ("f32", "f16")],
    *[(16, k, kind, kind, "s32") for kind, k in (("s8", 16), ("s8", 32), ("u8", 32))],
    *[(8, 16, a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")],
    *[(m, k, a, b, "s32") for m, k in ((8, 32), (16, 32), (16, 64)) for a, b in (("s4", "s4"), ("u4", "s4"))],
    *[(m, k, "b1", "b1", "s32") for m, k in ((8, 128), (16, 128), (16, 256))],
    *[(m, k, "f64", "f64", "f64") for m, k in ((8, 4), (16, 4), (16, 8), (16, 16))],
]


@pytest.mark.parametrize(("m", "k", "a_kind", "b_kind", "sums"), SHAPES)
def test_shapes(m: int, k: int, a_kind: str, b_kind: str, sums: str) -> None:
    a, b = values(a_kind, m, k, seed=1), values(b_kind, k, 8, seed=2)
    c = torch.randint(-99, 100, (m, 8), generator=torch.Generator().manual_seed(3)).double()
    kinds, places = f"{a_kind} {b_kind} {sums} {sums}", places_of(m, a_kind)
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col.{sums}.{a_kind}.{b_kind}.{sums}"
    if a_kind != "b1":
        assert torch.equal(multiply(opcode, kinds, [a, b, c], places), a @ b + c)
        return
    for name, ones in (("and", a @ b), ("xor", a @ (1 - b) + (1 - a) @ b)):
        assert torch.equal(multiply(f"{opcode}.{name}.popc", kinds, [a, b, c], places), ones + c)


def test_saturation() -> None:
    a, b = torch.full((8, 16), 127.0), torch.full((16, 8), 127.0)
    c = torch.full((8, 8), 2.0**31 - 5, dtype=torch.float64)
    opcode = "mma.sync.aligned.m8n8k16.row.col{}.s32.s8.s8.s32"
    for form, expected in ((".satfinite", 2**31 - 1), ("", 2**31 - 5 + 16 * 127**2 - 2**32)):
        got = multiply(opcode.format(form), "s8 s8 s32 s32", [a, b, c], places_of(8, "s8"))
        assert (got == expected).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_rounding_of_fp64_products(mode: str) -> None:
    """Checks the rounding of 1 + 2^-60, which is between two numbers."""
    a, b, c = torch.zeros(8, 4).double(), torch.zeros(4, 8).double(), torch.ones(8, 8).double()
    a[0, 0], b[0, 0] = 2.0**-30, 2.0**-30
    opcode = f"mma.sync.aligned.m8n8k4.row.col.{mode}.f64.f64.f64.f64"
    got = multiply(opcode, "f64 f64 f64 f64", [a, b, c], places_of(8, "f64"))
    assert got[0, 0] == (1 + 2.0**-52 if mode == "rp" else 1) and got[1, 1] == 1


@pytest.mark.parametrize("k", [8, 16])
def test_rounding_of_fp16_sums(k: int) -> None:
    a, b = torch.zeros(16, k), torch.zeros(k, 8)
    a[:, 0], b[0, :] = 1, 1
    large = torch.full((16, 8), 2048.0)  # from here on, fp16 has even numbers only
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.f16.f16.f16.f16"
    assert (multiply(opcode, "f16 f16 f16 f16", [a, b, large], places_of(16, "f16")) == 2048).all()


def quad_rows(lane: int) -> int:
    return lane % 4 + 4 * (lane >= 16)


@pytest.mark.parametrize("layouts", ["row.col", "col.row", "row.row", "col.col"])
@pytest.mark.parametrize(("c_kind", "d_kind"), [("f16", "f16"), ("f32", "f32"), ("f16", "f32")])
def test_quads(layouts: str, c_kind: str, d_kind: str) -> None:
    """Checks m8n8k4 of fp16, which computes four products; here they are diagonal blocks of one product."""
    layout_a, layout_b = layouts.split(".")
    a, b, c = values("f16", 32, 4, seed=1), values("f16", 4, 32, seed=2), values("f16", 32, 8, seed=3)

    def block(lane: int) -> int:
        return 8 * (lane % 16 // 4)

    def place_a(lane: int, i: int) -> tuple[int, int]:
        if layout_a == "row":
            return block(lane) + quad_rows(lane), i
        return block(lane) + i + 4 * (lane >= 16), lane % 4

    def place_b(lane: int, i: int) -> tuple[int, int]:
        if layout_b == "col":
            return i, block(lane) + quad_rows(lane)
        return lane % 4, block(lane) + i + 4 * (lane >= 16)

    def place_sum(kind: str) -> Place:
        def place(lane: int, i: int) -> tuple[int, int]:
            if kind == "f16":
                return block(lane) + quad_rows(lane), i
            return block(lane) + (lane & 1) + (i & 2) + 4 * (lane >= 16), (i & 4) + (lane & 2) + (i & 1)

        return place

    places = [place_a, place_b, place_sum(c_kind), place_sum(d_kind)]
    opcode = f"mma.sync.aligned.m8n8k4.{layouts}.{d_kind}.f16.f16.{c_kind}"
    got = multiply(opcode, f"f16 f16 {c_kind} {d_kind}", [a, b, c], places)
    for start in range(0, 32, 8):
        rows = slice(start, start + 8)
        assert torch.equal(got[rows], a[rows] @ b[:, rows] + c[rows])
