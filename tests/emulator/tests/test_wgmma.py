"""Tests of wgmma against PyTorch, with independent operand layouts, and of the errors for broken rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module
from emulator_wgmma import DTYPES, WIDTHS, Form, Layout, kernel, run
from expected_errors import failing

FP8 = ("e4m3", "e5m2")
INT8 = ("s8", "u8")


def draw_layout(draw: random.Random, rows: int, width: int, mn_major: bool) -> Layout:
    """Draws a canonical layout, dense or with gaps, alone or inside a larger pattern."""
    # A matrix with M or N contiguous must consist of whole atoms, which are as wide as the swizzle.
    swizzle = draw.choice([each for each in (0, 32, 64, 128) if not mn_major or each == 0 or rows * width % each == 0])
    gap = draw.choice((0, 0, 16 if swizzle == 0 else 1024))
    depth_units = 2  # chunks of 16 bytes
    if not mn_major:
        if swizzle == 0:
            leading = 128 + gap if draw.random() < 0.5 else rows // 8 * 128 + gap
            stride = leading * depth_units if leading < rows * 16 else 128
            return Layout(0, False, rows, width, leading, stride)
        start = 32 * draw.randrange(swizzle // 32)
        pattern = draw.choice((0, 0, 1024, 128, 384, 896))
        return Layout(swizzle, False, rows, width, 16, 8 * swizzle + gap, start, pattern)
    if swizzle == 0:
        leading, stride = (128, 256 + gap) if draw.random() < 0.5 else (rows // 8 * 128 + gap, 128)
        return Layout(0, True, rows, width, leading, stride)
    atoms = rows * width // swizzle
    k_first = draw.random() < 0.5
    leading, stride = (2 * 8 * swizzle + gap, 8 * swizzle) if k_first else (8 * swizzle, atoms * 8 * swizzle + gap)
    return Layout(swizzle, True, rows, width, leading, stride, 0, draw.choice((0, 0, 1024, 256)))


def draw_form(draw: random.Random, a: str, b: str, sums: str) -> Form:
    integer = sums == "s32"
    columns = draw.choice([n for n in range(8, 257, 8) if not integer or n <= 32 or n % 16 == 0])
    transposes = WIDTHS[a] == 2
    from_registers = draw.random() < 0.3
    layout_a = None if from_registers else draw_layout(draw, 64, WIDTHS[a], transposes and draw.random() < 0.5)
    layout_b = draw_layout(draw, columns, WIDTHS[b], transposes and draw.random() < 0.5)
    signs = (1, 1) if integer else (draw.choice((1, -1)), draw.choice((1, -1)))
    saturates = integer and draw.random() < 0.5
    return Form(columns, a, b, sums, layout_a, layout_b, signs, draw.random() < 0.7, saturates)


TYPES = [
    *(("f16", "f16", sums) for sums in ("f32", "f16")),
    ("bf16", "bf16", "f32"),
    ("tf32", "tf32", "f32"),
    *((a, b, sums) for a in FP8 for b in FP8 for sums in ("f32", "f16")),
    *((a, b, "s32") for a in INT8 for b in INT8),
]
SUMS = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}


def matrices(form: Form, generator: torch.Generator, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A, B and C with random integers."""

    def matrix(rows: int, columns: int, low: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, columns), generator=generator).to(torch.float32).to(dtype)

    def unsigned(kind: str) -> int:
        return 0 if kind == "u8" else low

    a = matrix(64, form.depth, unsigned(form.a), DTYPES[form.a])
    b = matrix(form.columns, form.depth, unsigned(form.b), DTYPES[form.b])
    if form.a == "u8":
        a = a.view(torch.uint8)
    if form.b == "u8":
        b = b.view(torch.uint8)
    return a, b, matrix(64, form.columns, low, SUMS[form.sum])


def expected(form: Form, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    product = (a.double() @ b.double().T) * form.signs[0] * form.signs[1]
    return product + c.double() if form.adds else product


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize(("a", "b", "sums"), TYPES)
def test_drawn_forms(a: str, b: str, sums: str, case: int) -> None:
    """Checks exact sums of small integers, which reveal any element in a wrong position."""
    draw = random.Random(f"{a} {b} {sums} {case}")
    form = draw_form(draw, a, b, sums)
    left, right, start = matrices(form, torch.Generator().manual_seed(case), -4, 5)
    out, report = run(form, left, right, start, seed=case, uninitialised=False)
    assert torch.equal(out.double(), expected(form, left, right, start)), form
    counted = report.tensor_core[f"{a} * {b} + {sums}"]
    assert (counted.instructions, counted.multiply_adds) == (1, 64 * form.columns * form.depth)


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_every_shape(columns: int) -> None:
    layout_a = Layout(128, False, 64, 2, 16, 1024)
    form = Form(columns, "bf16", "bf16", "f32", layout_a, Layout(128, False, columns, 2, 16, 1024))
    a, b, c = matrices(form, torch.Generator().manual_seed(columns), -8, 9)
    assert torch.equal(run(form, a, b, c)[0].double(), expected(form, a, b, c))


K_MAJOR = Layout(128, False, 64, 2, 16, 1024)
PLAIN = Form(16, "bf16", "bf16", "f32", K_MAJOR, Layout(128, False, 16, 2, 16, 1024))


@pytest.mark.parametrize(
    ("kind", "bound"), [("bf16", 2e-7), ("f16", 2e-7), ("tf32", 2e-7), ("e4m3", 4e-4), ("e5m2", 4e-4)]
)
def test_precision(kind: str, bound: float) -> None:
    """Checks that errors are within a bound times the sum of |a * b|; the bound of fp8 is larger."""
    width = WIDTHS[kind]
    layouts = (Layout(32, False, 64, width, 16, 256), Layout(32, False, 32, width, 16, 256))
    form = Form(32, kind, kind, "f32", *layouts)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, form.depth, generator=generator).to(DTYPES[kind]) for rows in (64, 32))
    c = torch.randn(64, 32, generator=generator)
    if kind == "tf32":
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    out = run(form, a, b, c)[0].double()
    magnitude = a.double().abs() @ b.double().abs().T + c.abs()
    error = ((out - expected(form, a, b, c)).abs() / magnitude).max().item()
    assert error < bound
    if kind in FP8:
        assert error > 1e-6, "sums of fp8 keep fewer bits"
        assert (out.float().view(torch.int32) & 0x3FF == 0).all()


@pytest.mark.parametrize(
    ("product", "start", "small", "result"),
    [
        (1.0, 1.75 * 2**-13, 2.0**-14, 1 + 2**-13),  # the small product and some bits of the accumulator are lost
        (-1.0, 1.75 * 2**-13, 0.0, -1 + 2**-13),
        (1.0, 2.0**-14, -(2.0**-14), 1.0),
        (0.0, 1 + 2.0**-20, 0.0, 1.0),  # the last 10 mantissa bits are lost
        (0.0, 2.0**-30, 2.0**-14, 2.0**-14),
    ],
)
def test_sums_of_fp8_keep_13_bits(product: float, start: float, small: float, result: float) -> None:
    layouts = (Layout(32, False, 64, 1, 16, 256), Layout(32, False, 8, 1, 16, 256))
    form = Form(8, "e5m2", "e5m2", "f32", *layouts)
    a, b = torch.zeros(64, 32), torch.zeros(8, 32)
    a[:, 0], b[:, 0] = product, 1.0
    a[:, 9], b[:, 9] = small * 2**7, 2.0**-7
    out = run(form, a.to(DTYPES["e5m2"]), b.to(DTYPES["e5m2"]), torch.full((64, 8), start))[0]
    assert (out == result).all(), out[0, 0]


def test_integers_saturate_or_wrap() -> None:
    layouts = (Layout(0, False, 64, 1, 128, 256), Layout(0, False, 8, 1, 128, 256))
    a, b = torch.full((64, 32), 127, dtype=torch.int8), torch.full((8, 32), 127, dtype=torch.int8)
    c = torch.full((64, 8), 2**31 - 1, dtype=torch.int32)
    for saturates, value in ((True, 2**31 - 1), (False, 2**31 - 1 + 32 * 127 * 127 - 2**32)):
        form = Form(8, "s8", "s8", "s32", *layouts, saturates=saturates)
        assert (run(form, a, b, c)[0] == value).all()


def test_infinities_and_nan() -> None:
    a, b, c = matrices(PLAIN, torch.Generator().manual_seed(0), -4, 5)
    a[3, 5], a[7, 1] = torch.inf, torch.nan
    out = run(PLAIN, a, b, c)[0]
    assert torch.equal(out.nan_to_num(nan=-99.0), expected(PLAIN, a, b, c).float().nan_to_num(nan=-99.0))


WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
FENCE = "wgmma.fence.sync.aligned;"
MULTIPLY = f"{FENCE} {{mma}} {WAIT}"


def plain(body: str, seed: int = 0, form: Form = PLAIN, **options: object) -> Tensor:
    a, b, c = matrices(form, torch.Generator().manual_seed(0), -4, 5)
    return run(form, a, b, c, body, seed, **options)[0]


def fails(body: str, text: str, kind: str = "wgmma", form: Form = PLAIN, **options: object) -> EmulatorError:
    """Checks that the error occurs at every seed, and returns it."""
    for seed in range(4):
        with failing(kind) as caught:
            plain(body, seed, form, **options)
        assert text in str(caught.value)
        assert caught.value.line is not None
    return caught.value


REGISTERS = Form(16, "bf16", "bf16", "f32", None, Layout(128, False, 16, 2, 16, 1024))

FAULTS = {
    "accumulator read": (
        f"{FENCE} {{mma}} wgmma.commit_group.sync.aligned; add.f32 %f9, %f3, %f3; wgmma.wait_group.sync.aligned 0;",
        "an accumulator of wgmma.mma_async is read",
        f"{MULTIPLY} add.f32 %f9, %f3, %f3;",
    ),
    "accumulator read, group not committed": (
        f"{FENCE} {{mma}} wgmma.wait_group.sync.aligned 0; st.shared.f32 [smem], %f0;",
        "an accumulator of wgmma.mma_async is read",
        MULTIPLY,
    ),
    "accumulator read, too many groups pending": (
        f"{FENCE} {{mma}} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;",
        "an accumulator of wgmma.mma_async is read",
        MULTIPLY,
    ),
    "accumulator written": (
        f"{FENCE} {{mma}} mov.f32 %f5, 0f00000000; {WAIT}",
        "an accumulator of wgmma.mma_async is written",
        f"{MULTIPLY} mov.f32 %f5, 0f00000000;",
    ),
    "accumulator written without a fence": (
        f"{FENCE} add.f32 %f5, %f5, %f5; {{mma}} {WAIT}",
        "an accumulator was written after the last wgmma.fence",
        f"add.f32 %f5, %f5, %f5; {MULTIPLY}",
    ),
    "no fence at all": (f"{{mma}} {WAIT}", "before any wgmma.fence", MULTIPLY),
    "warps differ": (
        f"{FENCE} setp.lt.u32 %p3, %r0, 96; @!%p3 bra SKIP; {{mma}} SKIP: {WAIT}",
        "",
        f"{FENCE} setp.lt.u32 %p3, %r0, 128; @!%p3 bra SKIP; {{mma}} SKIP: {WAIT}",
    ),
    "descriptors differ between lanes": (
        f"cvt.u64.u32 %rd12, %r0; add.u64 %rd11, %rd11, %rd12; {MULTIPLY}",
        "threads of a warp have different descriptors of matrix B",
        MULTIPLY,
    ),
    "descriptors differ between warps": (
        f"shr.u32 %r20, %r0, 5; cvt.u64.u32 %rd12, %r20; add.u64 %rd11, %rd11, %rd12; {MULTIPLY}",
        "with different descriptors",
        MULTIPLY,
    ),
    "scale-d differs between lanes": (
        f"setp.ne.u32 %p1, %r0, 5; {MULTIPLY}",
        "different scale-d",
        f"setp.ne.u32 %p1, %r0, -1; {MULTIPLY}",
    ),
    "outside of shared memory": (f"add.u64 %rd11, %rd11, 0x3000; {MULTIPLY}", "matrix B: 16 bytes at offset", MULTIPLY),
    "reserved bits": (f"or.b64 %rd11, %rd11, 0x10000000000000; {MULTIPLY}", "reserved bits", MULTIPLY),
    "base offset without a pattern": (
        f"and.b64 %rd11, %rd11, 0x3fffffffffffffff; or.b64 %rd11, %rd11, 0x2000000000000; {MULTIPLY}",
        "base offset",
        MULTIPLY,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    bad, text, good = FAULTS[name]
    fails(bad, text)
    plain(good)


def test_matrix_a_in_registers_is_touched() -> None:
    """Checks registers of A that are written or read before the wait, or written after the fence."""
    early = "wgmma.commit_group.sync.aligned; {} wgmma.wait_group.sync.aligned 0;"
    fails(f"{FENCE} {{mma}} " + early.format("mov.b32 %r11, 0;"), "matrix A is written before", form=REGISTERS)
    fails(f"{FENCE} {{mma}} " + early.format("add.u32 %r20, %r11, 1;"), "matrix A is read before", form=REGISTERS)
    fails(f"{FENCE} mov.b32 %r11, 0; {{mma}} {WAIT}", "matrix A was written after the last", form=REGISTERS)
    late = f"mov.b32 %r12, %r12; {MULTIPLY} mov.b32 %r11, 0; add.u32 %r20, %r11, 1;"
    plain(late, form=REGISTERS)


def n_major(columns: int, swizzle: int, start: int = 0) -> Form:
    layout = Layout(swizzle, True, columns, 2, 8 * swizzle, -(-2 * columns // swizzle) * 8 * swizzle, start)
    return Form(columns, "bf16", "bf16", "f32", None, layout)


@pytest.mark.parametrize(
    ("columns", "swizzle", "widest"), [(96, 128, 64), (160, 128, 64), (80, 128, 32), (48, 64, 32), (80, 64, 32)]
)
def test_matrices_with_n_contiguous_are_whole_swizzle_atoms(columns: int, swizzle: int, widest: int) -> None:
    """Checks a B that ends in the middle of an atom, and the widest swizzle that divides N."""
    fails(MULTIPLY, "Shared Memory Matrix Layout", form=n_major(columns, swizzle))
    plain(MULTIPLY, form=n_major(columns, widest))


def test_matrices_of_several_swizzle_atoms_begin_with_one() -> None:
    form = n_major(64, 128)
    fails(f"add.u64 %rd11, %rd11, 4; {MULTIPLY}", "from element 32 of a swizzle atom on", form=form)
    plain(MULTIPLY, form=form)
    form = replace(form, layout_a=Layout(64, True, 64, 2, 512, 1024))
    fails(f"add.u64 %rd10, %rd10, 2; {MULTIPLY}", "matrix A is MN-major, with 64 elements", form=form)
    plain(MULTIPLY, form=form)


@pytest.mark.parametrize("start", [0, 32, 64])
def test_a_matrix_may_lie_in_one_swizzle_atom(start: int) -> None:
    """Checks this case, which Triton uses when several warpgroups split N."""
    form = n_major(32, 128, start)
    a, b, c = matrices(form, torch.Generator().manual_seed(0), -4, 5)
    assert torch.equal(run(form, a, b, c)[0].double(), expected(form, a, b, c))


def test_another_shape_on_the_same_accumulators() -> None:
    other = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd10, %rd11, 1, 1, 1, 0, 0;"
    fails(f"{FENCE} {{mma}} {other} {WAIT}", "of another shape")
    fails(f"{FENCE} {other} {{mma}} {WAIT}", "under way as other ones")
    plain(f"{MULTIPLY} {FENCE} {other} {WAIT}")


def test_warpgroups_are_whole() -> None:
    module = kernel(PLAIN)
    assert PLAIN.layout_a is not None and PLAIN.layout_b is not None
    memory, left, sums = torch.zeros(16384, dtype=torch.uint8), torch.zeros(256, 4), torch.zeros(256, 8)
    descriptors = [x.descriptor - 2**64 * (x.descriptor >> 63) for x in (PLAIN.layout_a, PLAIN.layout_b)]
    args = [memory, 16384, left, *descriptors, sums, 1]
    for threads in (96, 160, 112):
        with failing("wgmma", "warpgroup has fewer"):
            module.launch("k", (1,), (threads,), args, shared_bytes=16384, races=False)
    module.launch("k", (1,), (256,), args, shared_bytes=16384, races=False)


def test_the_moment_of_reading_is_drawn() -> None:
    """Checks that some warps see a change of B between issue and wait, and none sees a change after the wait."""
    change = "bar.sync 0; mov.b32 %r21, 0x41004100; mov.u32 %r22, smem; mad.lo.u32 %r22, %r0, 16, %r22;"
    change += "st.shared.v4.b32 [%r22+9216], {%r21, %r21, %r21, %r21}; bar.sync 0;"
    right = plain(MULTIPLY)
    saw_old = []
    body = f"{FENCE} {{mma}} wgmma.commit_group.sync.aligned; {change} wgmma.wait_group.sync.aligned 0;"
    for seed in range(8):
        assert torch.equal(plain(f"{MULTIPLY} {change}", seed), right)
        early = plain(body, seed, races=False)
        saw_old += [torch.equal(early[rows : rows + 16], right[rows : rows + 16]) for rows in range(0, 64, 16)]
    assert 2 < sum(saw_old) < 30
    fails(body, "not ordered with the asynchronous read", "race")


def test_operands_need_a_fence_between_the_proxies() -> None:
    write = "mov.b32 %r21, 0; mov.u32 %r22, smem; mad.lo.u32 %r22, %r0, 4, %r22; st.shared.b32 [%r22+9216], %r21;"
    fails(f"{write} bar.sync 0; {MULTIPLY}", "", "proxy")
    plain(f"{write} fence.proxy.async.shared::cta; bar.sync 0; {MULTIPLY}")


@pytest.mark.parametrize("seed", range(4))
def test_a_move_renames_what_is_under_way(seed: int) -> None:
    """Checks movs that give accumulators other names between two wgmma, as compilers emit in loops."""
    names = [f"%f{i}" for i in range(8)]
    there = " ".join(f"mov.f32 %g{i}, {name};" for i, name in enumerate(names))
    back = " ".join(f"mov.f32 {name}, %g{i};" for i, name in enumerate(names))
    renamed = ", ".join(f"%g{i}" for i in range(8))
    second = f"{PLAIN.opcode} {PLAIN.operands(renamed, '%rd10', '%rd11', '1')}"
    body = f".reg .f32 %g<8>; {FENCE} {{mma}} {there} {second} wgmma.commit_group.sync.aligned; {back} "
    twice = plain(f"{FENCE} {{mma}} {{mma}} {WAIT}")
    assert torch.equal(plain(f"{{ {body} wgmma.wait_group.sync.aligned 0; }}", seed), twice)
    stale = f".reg .f32 %g<8>; {FENCE} {{mma}} {there} {second} add.f32 %f9, %f1, %f1; {WAIT}"
    fails(f"{{ {stale} }}", "a copy of an accumulator is read")


@pytest.mark.parametrize(
    "opcode",
    [
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n8k16.bf16.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n24k32.s32.s8.f16",
        "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8",
    ],
)
def test_unknown_forms(opcode: str) -> None:
    text = kernel(PLAIN, f"{opcode} {{%f0, %f1, %f2, %f3}}, %rd10, %rd11, 1, 1, 1, 0, 0;")
    assert isinstance(text, Module)
    with failing("unsupported"):
        text.parameters("k")
