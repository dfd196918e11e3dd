"""Tests of single instructions against PyTorch or a definition written down here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ptx_body import run


def unary(instruction: str, source: Tensor) -> Tensor:
    """Runs ``instruction`` for each 4-byte element of ``source``, from %r1 or %f1 to %r2 or %f2."""
    count = len(source)
    source = torch.cat([source, source.new_zeros(-count % 32)])  # whole warps
    out = torch.zeros_like(source)
    kind = "f" if source.dtype == torch.float32 else "r"
    for start in range(0, len(source), 32):
        run(
            f"add.s64 %rd0, %rd0, %rd9; add.s64 %rd1, %rd1, %rd9; ld.global.b32 %{kind}1, [%rd0];\n"
            f"{instruction} st.global.b32 [%rd1], %{kind}2;",
            source[start : start + 32],
            out[start : start + 32],
        )
    return out[:count]


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e-40,
    65504.0,
    65519.9,
    65520.0,
    6e-8,
    2.98e-8,
    3.4e38,
]


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_to_16_bits(kind: str, dtype: torch.dtype) -> None:
    numbers = torch.cat([torch.tensor(SPECIAL), torch.randn(50), torch.randn(32) * 1e-6]).float()
    back = "cvt.f32.f16 %f2, %h1;" if kind == "f16" else "mov.b32 %r9, {0, %h1}; mov.b32 %f2, %r9;"
    got = unary(f"cvt.rn.{kind}.f32 %h1, %f1; {back}", numbers)
    assert torch.equal(got.nan_to_num(nan=-7.0), numbers.to(dtype).float().nan_to_num(nan=-7.0))


@pytest.mark.parametrize(
    ("rounding", "function"), [("rni", torch.round), ("rzi", torch.trunc), ("rmi", torch.floor), ("rpi", torch.ceil)]
)
def test_float_to_integer(rounding: str, function: Any) -> None:
    numbers = torch.tensor([0.5, 1.5, -0.5, -2.5, 2.4, -7.9, 3e9, -3e9, torch.nan, torch.inf])
    got = unary(f"cvt.{rounding}.s32.f32 %r9, %f1; mov.b32 %f2, %r9;", numbers).view(torch.int32)
    expected = function(numbers.double()).nan_to_num(nan=0.0).clamp(-(2**31), 2**31 - 1).to(torch.int32)
    assert torch.equal(got, expected)


INTEGERS = torch.tensor([0, 1, -1, 7, -13, 2**31 - 1, -(2**31), 0x12345678], dtype=torch.int32)


@pytest.mark.parametrize(
    ("instruction", "function"),
    [
        ("prmt.b32 %r2, %r1, 0, 0x0123;", lambda x: int.from_bytes((x % 2**32).to_bytes(4, "little"), "big")),
        ("bfe.s32 %r2, %r1, 4, 8;", lambda x: ((x >> 4) + 128) % 256 - 128),
        ("bfi.b32 %r2, %r1, 0, 8, 4;", lambda x: (x & 15) << 8),
        ("shf.l.wrap.b32 %r2, %r1, %r1, 5;", lambda x: (x << 5) | (x % 2**32 >> 27)),
        ("lop3.b32 %r2, %r1, 255, 15, 0x96;", lambda x: x ^ 255 ^ 15),
        ("mul.hi.s32 %r2, %r1, 1000003;", lambda x: x * 1000003 >> 32),
        ("mul.hi.u32 %r2, %r1, -5;", lambda x: (x % 2**32) * (2**32 - 5) >> 32),
        ("div.s32 %r2, %r1, 3;", lambda x: abs(x) // 3 * (1 if x >= 0 else -1)),
        ("rem.s32 %r2, %r1, 3;", lambda x: abs(x) % 3 * (1 if x >= 0 else -1)),
        ("shr.s32 %r2, %r1, 40;", lambda x: x >> 31),
        ("shl.b32 %r2, %r1, 40;", lambda x: 0),
        ("clz.b32 %r2, %r1;", lambda x: 32 - (x % 2**32).bit_length()),
        ("popc.b32 %r2, %r1;", lambda x: bin(x % 2**32).count("1")),
        ("brev.b32 %r2, %r1;", lambda x: int(f"{x % 2**32:032b}"[::-1], 2)),
    ],
)
def test_integers(instruction: str, function: Any) -> None:
    got = unary(instruction, INTEGERS)
    assert [int(x) % 2**32 for x in got] == [function(int(x)) % 2**32 for x in INTEGERS]


def test_minimum_and_nan() -> None:
    numbers = torch.tensor(SPECIAL)
    ordinary = unary("max.f32 %f2, %f1, 0fC0000000;", numbers)
    assert torch.equal(ordinary, torch.fmax(numbers, torch.tensor(-2.0)))
    propagating = unary("min.NaN.f32 %f2, %f1, 0f40000000;", numbers)
    assert torch.equal(propagating.nan_to_num(nan=-7.0), torch.minimum(numbers, torch.tensor(2.0)).nan_to_num(nan=-7.0))


def operand(matrix: Tensor, row: int, column: int, count: int) -> int:
    """Returns a register with ``count`` adjacent elements of a row, the first in the lowest bits."""
    return int.from_bytes(
        matrix[row, column : column + count].contiguous().view(torch.uint8).numpy().tobytes(), "little"
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "depth"),
    [
        ("f16", torch.float16, 16),
        ("f16", torch.float16, 8),
        ("bf16", torch.bfloat16, 16),
        ("bf16", torch.bfloat16, 8),
        ("tf32", torch.float32, 8),
        ("tf32", torch.float32, 4),
        ("s8", torch.int8, 32),
        ("s8", torch.int8, 16),
        ("u8", torch.uint8, 32),
    ],
)
def test_mma(kind: str, dtype: torch.dtype, depth: int) -> None:
    """Checks exact sums of small integers. The fragment layouts are written out from the manual's figures."""
    generator = torch.Generator().manual_seed(depth)
    low = 0 if kind == "u8" else -8
    a = torch.randint(low, 9, (16, depth), generator=generator).to(dtype)
    b = torch.randint(low, 9, (depth, 8), generator=generator).to(dtype)
    c = torch.randint(-99, 100, (16, 8), generator=generator)
    each = 4 // a.element_size()
    registers_a, registers_b = 16 * depth // 32 // each, 8 * depth // 32 // each
    registers = torch.zeros(registers_a + registers_b + 8, 32, dtype=torch.int64)
    integral = not dtype.is_floating_point
    sums = c.to(torch.int32 if integral else torch.float32).view(torch.int32)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for r in range(registers_a):
            registers[r, lane] = operand(a, group + 8 * (r % 2), each * (thread + 4 * (r // 2)), each)
        for r in range(registers_b):
            registers[registers_a + r, lane] = operand(b.T.contiguous(), group, each * (thread + 4 * r), each)
        for r in range(4):
            registers[registers_a + registers_b + r, lane] = int(sums[group + 8 * (r // 2), 2 * thread + r % 2])
    words = torch.where(registers >= 2**31, registers - 2**32, registers).to(torch.int32)
    count = registers_a + registers_b + 4
    names = [f"%r{10 + i}" for i in range(count)]
    sum_type, letter = ("s32", "r") if integral else ("f32", "f")
    loads = "".join(f"ld.global.b32 {name}, [%rd1+{128 * i}];" for i, name in enumerate(names))
    moves = "".join(f"mov.b32 %{letter}{1 + i}, {name};" for i, name in enumerate(names[-4:]))
    groups = (names[:registers_a], names[registers_a : registers_a + registers_b])
    fragments = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    results = "{" + ", ".join(f"%{letter}{i}" for i in range(1, 5)) + "}"
    stores = "".join(f"st.global.b32 [%rd1+{128 * (count + i)}], %{letter}{1 + i};" for i in range(4))
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.{sum_type}.{kind}.{kind}.{sum_type}"
    report = run(
        f"add.s64 %rd1, %rd0, %rd9; {loads} {moves} {opcode} {results}, {fragments}, {results}; {stores}", words
    )
    assert report.opcodes[opcode] == 1
    got = words[count : count + 4]
    result = got if integral else got.view(torch.float32)
    expected = a.double() @ b.double() + c
    for lane in range(32):
        for r in range(4):
            assert result[r, lane].item() == expected[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2].item()


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans: bool) -> None:
    source, out = torch.arange(256, dtype=torch.int16), torch.zeros(4, 32, 2, dtype=torch.int16)
    suffix = ".trans" if trans else ""
    report = run(
        ".shared .align 16 .b8 s[512]; mov.u32 %r1, s; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;"
        "mul.wide.u32 %rd2, %r0, 16; add.s64 %rd2, %rd0, %rd2; ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd2];"
        "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5}; bar.warp.sync 0xffffffff;"
        f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r1]; add.s64 %rd1, %rd1, %rd9;"
        + "".join(f"st.global.b32 [%rd1+{128 * i}], %r{2 + i};" for i in range(4)),
        source,
        out,
    )
    matrices = source.view(4, 8, 8)
    expected = matrices.transpose(1, 2) if trans else matrices
    assert torch.equal(out.view(4, 8, 8), expected)
    assert report.shared_wavefronts == 8 and report.bank_conflicts == 0


@pytest.mark.parametrize("seed", range(5))
def test_lanes_part_and_meet(seed: int) -> None:
    """Checks divergence: half of the lanes call a function that loops up to the lane's index; then all shuffle."""
    function = """.func (.param .b32 result) count(.param .b32 upto)
{ .reg .pred %p<2>; .reg .b32 %r<4>; ld.param.b32 %r1, [upto]; mov.u32 %r2, 0;
LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra END; add.u32 %r2, %r2, 1; bra LOOP;
END: st.param.b32 [result], %r2; ret; }"""
    body = """and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, 100; @%p1 bra SKIP;
{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r0; call.uni (b), count, (a); ld.param.b32 %r2, [b]; }
SKIP: shfl.sync.bfly.b32 %r3, %r2, 1, 31, 0xffffffff; add.s64 %rd1, %rd0, %rd9; st.global.b32 [%rd1], %r3;"""
    out = torch.zeros(32, dtype=torch.int32)
    run(body, out, functions=function, seed=seed)
    assert out.tolist() == [lane + 1 if lane % 2 == 0 else 100 for lane in range(32)]


def test_atomics_and_counters() -> None:
    total = torch.zeros(1)
    report = run("red.global.add.f32 [%rd0], 0f3F800000; ld.relaxed.gpu.global.f32 %f1, [%rd0];", total, threads=256)
    assert total.item() == 256
    assert report.instructions["atomic"] == 8 and report.instructions["global"] == 8
    assert report.global_sectors == 16


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts(stride: int, wavefronts: int) -> None:
    body = (
        f".shared .align 16 .b8 s[4096]; mov.u32 %r1, s; mad.lo.s32 %r1, %r0, {stride}, %r1; st.shared.b32 [%r1], %r0;"
    )
    report = run(body)
    assert (report.shared_wavefronts, report.bank_conflicts) == (wavefronts, wavefronts - 1)
