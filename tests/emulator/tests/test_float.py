"""Tests of floating-point instructions: rounding modes, modifiers, minima and maxima, 16-bit pairs.

Correct rounding is checked with exact fractions and the neighbouring numbers of the format.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from ptx_body import evaluate, same

TINY = 2.0**-126


def numbers(dtype: torch.dtype, seed: int, count: int = 256) -> Tensor:
    """Returns numbers of all magnitudes: about 1, far apart, subnormal, and special values."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(count // 2, generator=generator, dtype=torch.float64)
    wide = torch.randn(count // 2, generator=generator, dtype=torch.float64)
    spread = {torch.float64: 200, torch.float32: 40, torch.bfloat16: 40, torch.float16: 8}[dtype]
    wide *= 2.0 ** torch.randint(-spread, spread, (count // 2,), generator=generator).double()
    values = torch.cat([plain, wide]).to(dtype)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, info.tiny / 4, -info.tiny / 4]
    values[torch.randperm(count, generator=generator)[: len(special)]] = torch.tensor(special, dtype=dtype)
    return values


@np.errstate(over="ignore")
def rounded(exact: Fraction, kind: type[np.floating], mode: str) -> float:
    """Rounds an exact value to a neighbouring number of the format, in the direction of ``mode``."""
    try:
        guess = kind(float(exact))
    except OverflowError:
        guess = kind(math.inf if exact > 0 else -math.inf)
    most = np.finfo(kind).max
    if np.isinf(guess):
        guess = np.copysign(most, guess)
    while guess > -most and Fraction(float(guess)) > exact:
        guess = np.nextafter(guess, kind(-math.inf))
    if Fraction(float(guess)) > exact:  # below the least finite number
        return -math.inf if mode == "rm" else -float(most)
    above = np.nextafter(guess, kind(math.inf))
    while not np.isinf(above) and Fraction(float(above)) <= exact:
        guess, above = above, np.nextafter(above, kind(math.inf))
    if Fraction(float(guess)) == exact:
        return float(guess)
    towards_above = mode == "rp" or (mode == "rz" and exact < 0)
    return float(above if towards_above else guess)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div", "fma"])
def test_directed_rounding(operation: str, mode: str, kind: str) -> None:
    dtype = torch.float32 if kind == "f32" else torch.float64
    sources = [numbers(dtype, seed) for seed in range(3 if operation == "fma" else 2)]
    operands = ", ".join(f"%{name}" for name in "abc"[: len(sources)])
    got = evaluate(f"{operation}.{mode}.{kind} %d, {operands};", dtype, *sources)
    exact: dict[str, Callable[..., Fraction]] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "fma": lambda a, b, c: a * b + c,
    }
    checked = 0
    for *values, result in zip(*(source.tolist() for source in sources), got.tolist(), strict=True):
        if not all(math.isfinite(value) for value in values) or (operation == "div" and values[1] == 0):
            continue
        expected = exact[operation](*map(Fraction, values))
        if expected == 0:
            continue  # the sign of zero is checked below
        assert result == rounded(expected, np.float32 if kind == "f32" else np.float64, mode), values
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding_of_roots_and_reciprocals(mode: str) -> None:
    source = numbers(torch.float32, 5).abs()
    roots = evaluate(f"sqrt.{mode}.f32 %d, %a;", torch.float32, source)
    reciprocals = evaluate(f"rcp.{mode}.f32 %d, %a;", torch.float32, source)
    for value, root, reciprocal in zip(source.tolist(), roots.tolist(), reciprocals.tolist(), strict=True):
        if not math.isfinite(value) or value == 0:
            continue
        assert reciprocal == rounded(1 / Fraction(value), np.float32, mode)
        below, above = Fraction(root), Fraction(float(np.nextafter(np.float32(root), np.float32(math.inf))))
        if mode == "rp":
            below, above = Fraction(float(np.nextafter(np.float32(root), np.float32(0)))), Fraction(root)
            assert below**2 < Fraction(value) <= above**2
        else:
            assert below**2 <= Fraction(value) < above**2


def test_zeros_of_directed_sums() -> None:
    one = torch.tensor([1.0])
    assert evaluate("sub.rm.f32 %d, %a, %a;", torch.float32, one).signbit().all()
    assert not evaluate("sub.rp.f32 %d, %a, %a;", torch.float32, one).signbit().any()


def test_rounding_mode_does_not_leak() -> None:
    """Checks that the rounding mode affects neither the next instruction nor PyTorch's arithmetic."""
    a, b = torch.tensor([1.0]), torch.tensor([2.0**-30])
    assert evaluate("add.rp.f32 %d, %a, %b;", torch.float32, a, b).item() == 1 + 2.0**-23
    assert evaluate("add.rp.f32 %d, %a, %b; add.rn.f32 %d, %a, %b;", torch.float32, a, b).item() == 1
    assert (a + b).item() == 1


@pytest.mark.parametrize("operation", ["add", "mul"])
def test_flush_and_saturate(operation: str) -> None:
    a, b = numbers(torch.float32, 3), numbers(torch.float32, 4)

    def flush(x: Tensor) -> Tensor:
        return torch.where(x.abs() < TINY, torch.copysign(torch.zeros(()), x), x)

    function = torch.add if operation == "add" else torch.mul
    flushed = flush(function(flush(a), flush(b)))
    assert same(evaluate(f"{operation}.ftz.f32 %d, %a, %b;", torch.float32, a, b), flushed)
    saturated = function(a, b).nan_to_num(nan=0.0).clamp(0, 1)
    assert torch.equal(evaluate(f"{operation}.sat.f32 %d, %a, %b;", torch.float32, a, b), saturated)
    both = evaluate(f"{operation}.ftz.sat.f32 %d, %a, %b;", torch.float32, a, b)
    assert torch.equal(both, flushed.nan_to_num(nan=0.0).clamp(0, 1))


def test_approximate_division_by_large_numbers_is_zero() -> None:
    a, b = torch.tensor([1.0, -2.0, math.inf, 6.0]), torch.tensor([2.0**127, 2.0**127, 2.0**127, 2.0**126])
    got = evaluate("div.approx.f32 %d, %a, %b;", torch.float32, a, b)
    assert same(got, torch.tensor([0.0, -0.0, math.nan, 6 * 2.0**-126]))


def test_gross_approximations_of_fp64() -> None:
    source = numbers(torch.float64, 6).abs()
    source = source[(source > 1e-300) & (source < 1e300)]
    for name, exact in (("rcp", 1 / source), ("rsqrt", source.rsqrt())):
        got = evaluate(f"{name}.approx.ftz.f64 %d, %a;", torch.float64, source)
        assert ((got / exact - 1).abs() < 2.0**-19).all()
        assert (got.view(torch.int64) & 0xFFFFFFFF == 0).all()


@pytest.mark.parametrize(("name", "torch_name"), [("min", "minimum"), ("max", "maximum")])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("f32", torch.float32), ("f64", torch.float64), ("f16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_extremes(name: str, torch_name: str, kind: str, dtype: torch.dtype) -> None:
    a, b = numbers(dtype, 7), numbers(dtype, 8)
    order = getattr(torch, torch_name)
    ordinary = order(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))
    assert same(evaluate(f"{name}.{kind} %d, %a, %b;", dtype, a, b) + 0, ordinary + 0)  # PyTorch's zeros have any sign
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert evaluate(f"{name}.{kind} %d, %a, %b;", dtype, zeros, -zeros).signbit().tolist() == [name == "min"] * 2
    if kind == "f64":
        return
    assert same(evaluate(f"{name}.NaN.{kind} %d, %a, %b;", dtype, a, b) + 0, order(a, b) + 0)
    sign = torch.where(a.signbit() ^ b.signbit(), -1.0, 1.0).to(dtype)
    of_magnitudes = order(torch.where(a.isnan(), b, a).abs(), torch.where(b.isnan(), a, b).abs())
    got = evaluate(f"{name}.xorsign.abs.{kind} %d, %a, %b;", dtype, a, b)
    assert same(got, torch.copysign(of_magnitudes, sign))


def test_copysign() -> None:
    a, b = (numbers(torch.float32, seed) for seed in (9, 10))
    assert same(evaluate("copysign.f32 %d, %a, %b;", torch.float32, a, b), torch.copysign(b, a))


HALVES = [("f16", torch.float16), ("bf16", torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_half_arithmetic(name: str, kind: str, dtype: torch.dtype) -> None:
    """Checks numbers and pairs against PyTorch, which computes in fp32 and rounds: correct for one operation."""
    a, b = numbers(dtype, 12), numbers(dtype, 13)
    expected = getattr(torch, name)(a, b)
    assert same(evaluate(f"{name}.rn.{kind} %d, %a, %b;", dtype, a, b), expected)
    pair = evaluate(f"{name}.{kind}x2 %d, %a, %b;", torch.int32, a.view(torch.int32), b.view(torch.int32))
    assert same(pair.view(dtype), expected)


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_half_fma(kind: str, dtype: torch.dtype) -> None:
    a, b, c = (numbers(dtype, seed) for seed in (14, 15, 16))
    exact = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        finite = all(map(math.isfinite, (x, y, z)))
        nearest = Fraction(x) * Fraction(y) + Fraction(z) if finite else None
        exact.append(nearest)
    got = evaluate(f"fma.rn.{kind} %d, %a, %b, %c;", dtype, a, b, c)
    step = torch.finfo(dtype).eps / 2
    for value, result in zip(exact, got.tolist(), strict=True):
        if value is None or abs(value) < torch.finfo(dtype).tiny or abs(value) > torch.finfo(dtype).max:
            continue
        assert abs(Fraction(result) - value) <= Fraction(step) * abs(value)
    relu = evaluate(f"fma.rn.relu.{kind} %d, %a, %b, %c;", dtype, a, b, c)
    assert same(relu, torch.where(got < 0, torch.zeros((), dtype=dtype), got))
    if kind == "f16":
        sat = evaluate("fma.rn.sat.f16 %d, %a, %b, %c;", dtype, a, b, c)
        assert torch.equal(sat, got.nan_to_num(nan=0.0).clamp(0, 1))


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_half_functions(kind: str, dtype: torch.dtype) -> None:
    a = numbers(dtype, 17)
    assert same(evaluate(f"neg.{kind} %d, %a;", dtype, a), -a)
    assert same(evaluate(f"abs.{kind} %d, %a;", dtype, a), a.abs())
    tanh = evaluate(f"tanh.approx.{kind}x2 %d, %a;", torch.int32, a.view(torch.int32)).view(dtype)
    assert same(tanh, a.double().tanh().to(dtype))
    flush = ".ftz" if kind == "bf16" else ""
    ex2 = evaluate(f"ex2.approx{flush}.{kind} %d, %a;", dtype, a)
    assert same(ex2, a.double().exp2().to(dtype))


def test_half_flush() -> None:
    a = torch.tensor([6e-8, -6e-8, 1.0, 6.2e-5], dtype=torch.float16)
    assert same(evaluate("add.ftz.f16 %d, %a, %a;", torch.float16, a), torch.where(a.abs() < 2.0**-14, a * 0, a + a))
    assert same(evaluate("neg.ftz.f16 %d, %a;", torch.float16, a), torch.where(a.abs() < 2.0**-14, a * -0.0, -a))


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
@pytest.mark.parametrize(
    ("name", "function"), [("lt", torch.lt), ("ge", torch.ge), ("neu", torch.ne), ("equ", torch.eq)]
)
def test_pair_comparisons(kind: str, dtype: torch.dtype, name: str, function: Callable[..., Tensor]) -> None:
    a, b = numbers(dtype, 18), numbers(dtype, 19)
    b[::3] = a[::3]
    expected = function(a, b)
    if name == "equ":
        expected |= a.isnan() | b.isnan()
    words = a.view(torch.int32), b.view(torch.int32)
    pair = evaluate(f"set.{name}.{kind}x2.{kind}x2 %d, %a, %b;", torch.int32, *words).view(dtype)
    assert torch.equal(pair, expected.to(dtype))
    masks = evaluate(f"set.{name}.u32.{kind}x2 %d, %a, %b;", torch.int32, *words).view(torch.int16)
    assert torch.equal(masks, -expected.to(torch.int16))
    bits = evaluate(
        f"setp.{name}.{kind}x2 %p0|%p1, %a, %b; selp.b32 %t0, 1, 0, %p0; selp.b32 %t1, 2, 0, %p1; or.b32 %d, %t0, %t1;",
        torch.int32,
        *words,
    )
    assert torch.equal(bits, (expected.view(-1, 2) * torch.tensor([1, 2])).sum(1).to(torch.int32))


def test_set_of_numbers() -> None:
    a, b = numbers(torch.float32, 20), numbers(torch.float32, 21)
    assert torch.equal(evaluate("set.gt.f32.f32 %d, %a, %b;", torch.float32, a, b), (a > b).float())
    combined = evaluate("setp.lt.f32 %p0, %a, 0f00000000; set.gt.and.u32.f32 %d, %a, %b, !%p0;", torch.int32, a, b)
    assert torch.equal(combined, -((a > b) & ~(a < 0)).int())
