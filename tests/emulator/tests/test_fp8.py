"""Tests of conversions of all fp8 numbers against PyTorch, and of mma.sync with fp8 operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module
from test_instructions import operand

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def convert(instructions: str, *sources: Tensor) -> Tensor:
    """Runs ``instructions`` for each element of the sources (32 bits each, in %r1 and %r2); the result is in %r3."""
    count = len(sources[0])
    loads = "".join(
        f"ld.param.u64 %rd1, [p{i}]; add.s64 %rd1, %rd1, %rd0; ld.global.b32 %r{1 + i}, [%rd1];"
        for i in range(len(sources))
    )
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(sources) + 1))
    module = Module(f""".version 8.4\n.target sm_90\n.address_size 64
.visible .entry k({parameters})
{{
    .reg .b16 %h<9>; .reg .b32 %r<19>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
    mov.u32 %r4, %tid.x; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r4, %r5, 128, %r4; mul.wide.u32 %rd0, %r4, 4;
    {loads} {instructions}
    ld.param.u64 %rd1, [p{len(sources)}]; add.s64 %rd1, %rd1, %rd0; st.global.b32 [%rd1], %r3;
    ret;
}}""")
    padded = [torch.cat([x.view(torch.int32), torch.zeros(-count % 128, dtype=torch.int32)]) for x in sources]
    out = torch.zeros_like(padded[0])
    module.launch("k", (len(out) // 128,), (128,), [*padded, out])
    return out[:count]


def saturated(numbers: Tensor, kind: str) -> Tensor:
    """Converts numbers as .rn.satfinite does, and returns bytes. PyTorch's own conversion does not saturate."""
    largest = torch.finfo(DTYPES[kind]).max
    narrow = numbers.float().clamp(-largest, largest).to(DTYPES[kind]).view(torch.uint8)
    return torch.where(numbers.isnan(), torch.tensor(0x7F, dtype=torch.uint8), narrow).int()


def all_neighbours(kind: str) -> Tensor:
    """Returns all numbers of the format, the midpoints between them with their neighbours, and special values."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPES[kind]).float()
    finite = numbers[numbers.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, 464.0, 465.0, -61440.0, 7e4]
    )
    return torch.cat([finite, middles, *near, special])


@pytest.mark.parametrize("kind", DTYPES)
def test_from_single(kind: str) -> None:
    numbers = all_neighbours(kind)
    other = numbers.flip(0)
    for relu in ("", ".relu"):
        got = convert(
            "mov.b32 %f1, %r1; mov.b32 %f2, %r2;"
            f"cvt.rn.satfinite{relu}.{kind}x2.f32 %h1, %f1, %f2; cvt.u32.u16 %r3, %h1;",
            numbers,
            other,
        )
        expected = [saturated(torch.where(x < 0, torch.tensor(0.0), x) if relu else x, kind) for x in (numbers, other)]
        assert torch.equal(got, expected[0] << 8 | expected[1])  # the first source is the upper half


@pytest.mark.parametrize("kind", DTYPES)
def test_from_every_half(kind: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    halves = bits.to(torch.uint16).view(torch.float16)
    pairs = bits << 16 | bits.flip(0)
    got = convert(f"cvt.rn.satfinite.{kind}x2.f16x2 %h1, %r1; cvt.u32.u16 %r3, %h1;", pairs)
    expected = saturated(halves, kind)
    assert torch.equal(got, expected << 8 | expected.flip(0))


@pytest.mark.parametrize("kind", DTYPES)
def test_every_number_to_half(kind: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    pairs = numbers.int() << 8 | numbers.flip(0).int()
    for relu in ("", ".relu"):
        got = convert(f"cvt.u16.u32 %h1, %r1; cvt.rn{relu}.f16x2.{kind}x2 %r3, %h1;", pairs)
        wide = numbers.view(DTYPES[kind]).float()
        if relu:
            wide = torch.where(wide < 0, torch.tensor(0.0), wide)
        high, low = ((x & 0xFFFF).to(torch.uint16).view(torch.float16) for x in (got >> 16, got))
        for part, expected in ((high, wide), (low, wide.flip(0))):
            assert torch.equal(part.isnan(), expected.isnan())
            assert torch.equal(part.float().nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("sums", ["f32", "f16"])
@pytest.mark.parametrize("depth", [16, 32])
@pytest.mark.parametrize("b_kind", DTYPES)
@pytest.mark.parametrize("a_kind", DTYPES)
def test_mma(a_kind: str, b_kind: str, depth: int, sums: str) -> None:
    """Checks exact sums of integers. The fragment layouts are written out from the manual's figures."""
    generator = torch.Generator().manual_seed(depth)
    a = torch.randint(-8, 9, (16, depth), generator=generator).float().to(DTYPES[a_kind])
    b = torch.randint(-8, 9, (8, depth), generator=generator).float().to(DTYPES[b_kind])  # by columns
    c = torch.randint(-99, 100, (16, 8), generator=generator).to(torch.float32 if sums == "f32" else torch.float16)
    in_a, in_b, in_c = depth // 8, depth // 16, 4 if sums == "f32" else 2
    words = torch.zeros(in_a + in_b + in_c, 32, dtype=torch.int64)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for r in range(in_a):
            words[r, lane] = operand(a, group + 8 * (r % 2), 4 * thread + 16 * (r // 2), 4)
        for r in range(in_b):
            words[in_a + r, lane] = operand(b, group, 4 * thread + 16 * r, 4)
        for r in range(in_c):
            row, column = (group + 8 * (r // 2), r % 2) if sums == "f32" else (group + 8 * r, 0)
            words[in_a + in_b + r, lane] = operand(c, row, 2 * thread + column, 1 if sums == "f32" else 2)
    memory = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    out = torch.zeros(in_c, 32, dtype=torch.int32)
    kind = "f32" if sums == "f32" else "b32"
    names = [f"%r{i}" for i in range(in_a + in_b)] + [f"%c{i}" for i in range(in_c)]
    groups = (names[in_a + in_b :], names[:in_a], names[in_a : in_a + in_b], names[in_a + in_b :])
    operands = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    module = Module(f""".version 8.7\n.target sm_90\n.address_size 64
.visible .entry k(.param .u64 p, .param .u64 q)
{{
    .reg .b32 %r<19>; .reg .{kind} %c<4>; .reg .b64 %rd<9>;
    mov.u32 %r18, %tid.x; mul.wide.u32 %rd3, %r18, 4; ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [q];
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    {"".join(f"ld.global.b32 {name}, [%rd1+{128 * i}];" for i, name in enumerate(names))}
    mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{a_kind}.{b_kind}.{sums} {operands};
    {"".join(f"st.global.b32 [%rd2+{128 * i}], %c{i};" for i in range(in_c))}
    ret;
}}""")
    module.launch("k", (1,), (32,), [memory, out])
    expected = (a.double() @ b.double().T + c.double()).to(c.dtype)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for r in range(in_c):
            row, column = (group + 8 * (r // 2), r % 2) if sums == "f32" else (group + 8 * r, 0)
            count = 1 if sums == "f32" else 2
            assert int(out[r, lane]) % 2**32 == operand(expected, row, 2 * thread + column, count)


@pytest.mark.parametrize(
    ("instruction", "target"),
    [
        ("cvt.rn.e4m3x2.f32 %h1, %f1, %f1;", "sm_90"),  # lacks .satfinite, which PTX requires
        ("cvt.rn.satfinite.e4m3x2.bf16x2 %h1, %r1;", "sm_90"),
        ("cvt.rn.satfinite.e2m1x2.f32 %h1, %f1, %f1;", "sm_90"),
        ("cvt.rz.satfinite.ue8m0x2.f32 %h1, %f1, %f1;", "sm_90"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f1;", "sm_80"),
        ("cvt.rn.satfinite.bf16x2.e4m3x2 %r1, %h1;", "sm_90"),
    ],
)
def test_unknown_forms(instruction: str, target: str) -> None:
    text = f".version 8.4\n.target {target}\n.address_size 64\n.visible .entry k() {{ .reg .b16 %h<3>; .reg .b32 %r<3>;"
    with pytest.raises(EmulatorError) as caught:
        Module(f"{text} .reg .f32 %f<3>; {instruction} ret; }}").parameters("k")
    assert caught.value.kind == "unsupported"
