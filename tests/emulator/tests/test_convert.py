"""Tests of cvt: every pair of types, roundings and modifiers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from ptx_body import evaluate, same

INTEGERS = {
    "u8": torch.uint8, "s8": torch.int8, "u16": torch.uint16, "s16": torch.int16,
    "u32": torch.uint32, "s32": torch.int32, "u64": torch.uint64, "s64": torch.int64,
}  # fmt: skip
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
EXACT_BITS = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
LEAST_EXPONENT = {"f16": -24, "bf16": -133, "f32": -149, "f64": -1074}


def limits(kind: str) -> tuple[int, int]:
    info = torch.iinfo(INTEGERS[kind])
    return info.min, info.max


def target(*kinds: str) -> str:
    """Returns the first target with the conversion: bf16 to and from types other than fp32 needs sm_90."""
    return "sm_90" if "bf16" in kinds and "f32" not in kinds else "sm_80"


def held(kind: str) -> torch.dtype:
    """Returns the type of the registers of integers, which have at least 16 bits."""
    return {8: torch.int16, 16: torch.int16, 32: torch.int32, 64: torch.int64}[torch.iinfo(INTEGERS[kind]).bits]


def to_integers(values: list[int], kind: str) -> Tensor:
    """Returns the values' bits in the type of their registers."""
    bits = torch.iinfo(held(kind)).bits
    return torch.tensor([(value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for value in values], dtype=held(kind))


def from_bits(bits: Tensor, kind: str) -> list[int]:
    least, most = limits(kind)
    return [(value - least) % (most - least + 1) + least for value in bits.tolist()]


@pytest.mark.parametrize(("source", "to"), list(itertools.permutations(INTEGERS, 2)))
def test_integer_to_integer(source: str, to: str) -> None:
    least, most = limits(source)
    values = [least, most, 0, 1, most // 3, least // 5, 200 % (most + 1), max(least, -7)]
    bits = to_integers(values, source)
    wrapped = from_bits(evaluate(f"cvt.{to}.{source} %d, %a;", held(to), bits), to)
    low, high = limits(to)
    assert wrapped == [(value - low) % (high - low + 1) + low for value in values]
    clamped = from_bits(evaluate(f"cvt.sat.{to}.{source} %d, %a;", held(to), bits), to)
    assert clamped == [max(low, min(high, value)) for value in values]


def nearest(value: Fraction, kind: str, mode: str) -> float:
    """Rounds a value to a format. The caller handles overflow."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value)))
    exponent += Fraction(2) ** (exponent + 1) <= abs(value)
    exponent -= Fraction(2) ** exponent > abs(value)
    unit = Fraction(2) ** max(exponent - EXACT_BITS[kind] + 1, LEAST_EXPONENT[kind])
    steps = value / unit
    rounding = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode]
    return float(rounding(steps) * unit)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("source", "to"), list(itertools.product(INTEGERS, FLOATS)))
def test_integer_to_float(source: str, to: str, mode: str) -> None:
    least, most = limits(source)
    values = [least, most, 0, 1, most // 3, least // 5, most - 1, most // 2 + 1, most // 7 * 5]
    got = evaluate(f"cvt.{mode}.{to}.{source} %d, %a;", FLOATS[to], to_integers(values, source), target=target(to))
    biggest = torch.finfo(FLOATS[to]).max
    for value, result in zip(values, got.tolist(), strict=True):
        expected = nearest(Fraction(value), to, mode)
        if abs(expected) > biggest:
            stays = mode == "rz" or mode == ("rm" if value > 0 else "rp")
            expected = math.copysign(biggest if stays else math.inf, value)
        assert result == expected, value


NUMBERS = [0.5, 1.5, -0.5, -2.5, 2.4, -7.9, 200.7, -129.0, 40000.0, 3e9, -3e9, 1e19, -1e19, 0.0, 65504.0, 1e-7]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize(("source", "to"), list(itertools.product(FLOATS, INTEGERS)))
def test_float_to_integer(source: str, to: str, mode: str) -> None:
    values = torch.tensor([*NUMBERS, math.inf, -math.inf, math.nan], dtype=torch.float64).to(FLOATS[source])
    got = from_bits(evaluate(f"cvt.{mode}.{to}.{source} %d, %a;", held(to), values, target=target(source)), to)
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    low, high = limits(to)
    for value, result in zip(values.tolist(), got, strict=True):
        if math.isnan(value):
            assert result == 0
        elif math.isinf(value):
            assert result == (high if value > 0 else low)
        else:
            assert result == max(low, min(high, rounding(value))), value


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("source", "to"),
    [("f64", "f32"), ("f64", "f16"), ("f32", "f16"), ("f32", "bf16"), ("f64", "bf16"), ("f16", "bf16")],
)
def test_float_to_narrower_float(source: str, to: str, mode: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-12, 12, (64,), generator=generator).double()
    values = values.to(FLOATS[source])
    got = evaluate(f"cvt.{mode}.{to}.{source} %d, %a;", FLOATS[to], values, target=target(source, to))
    for value, result in zip(values.tolist(), got.tolist(), strict=True):
        assert result == nearest(Fraction(value), to, mode), value


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_rounding_to_16_bits_of_special_numbers(to: str) -> None:
    numbers = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 65504.0, 65519.9, 65520.0, 3.4e38])
    numbers = torch.cat([numbers, torch.tensor([6e-8, 2.98e-8]), torch.randn(50), torch.randn(32) * 1e-6])
    assert same(evaluate(f"cvt.rn.{to}.f32 %d, %a;", FLOATS[to], numbers), numbers.to(FLOATS[to]))


@pytest.mark.parametrize(("source", "to"), [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64")])
def test_float_to_wider_float(source: str, to: str) -> None:
    values = torch.tensor([*NUMBERS, math.inf, -0.0, math.nan], dtype=torch.float64).to(FLOATS[source])
    assert same(evaluate(f"cvt.{to}.{source} %d, %a;", FLOATS[to], values), values.to(FLOATS[to]))


def test_modifiers() -> None:
    values = torch.tensor([-1.0, 0.25, 7.0, math.nan, 1e-40, -1e-40])
    assert evaluate("cvt.sat.f32.f32 %d, %a;", torch.float32, values).tolist()[:4] == [0.0, 0.25, 1.0, 0.0]
    assert same(evaluate("cvt.ftz.f32.f32 %d, %a;", torch.float32, values)[4:], torch.tensor([0.0, -0.0]))
    assert evaluate("cvt.rpi.ftz.f32.f32 %d, %a;", torch.float32, values)[4] == 0
    relu = evaluate("cvt.rn.relu.f16.f32 %d, %a;", torch.float16, values)
    assert relu[:3].tolist() == [0, 0.25, 7] and relu[3].isnan()
    large = torch.tensor([1e9, -1e9, math.inf, 3.0])
    finite = evaluate("cvt.rn.satfinite.f16.f32 %d, %a;", torch.float16, large, target="sm_90")
    assert finite.tolist() == [65504, -65504, 65504, 3]


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
def test_pairs(kind: str, dtype: torch.dtype) -> None:
    """Checks that the first source becomes the upper half."""
    generator = torch.Generator().manual_seed(2)
    high, low = torch.randn(32, generator=generator), torch.randn(32, generator=generator)
    pair = evaluate(f"cvt.rn.{kind}.f32 %d, %a, %b;", torch.int32, high, low).view(dtype).view(-1, 2)
    assert torch.equal(pair, torch.stack([low, high], 1).to(dtype))
    relu = evaluate(f"cvt.rn.relu.{kind}.f32 %d, %a, %b;", torch.int32, high, low).view(dtype).view(-1, 2)
    assert torch.equal(relu, pair.clamp(min=0))
    towards_zero = evaluate(f"cvt.rz.{kind}.f32 %d, %a, %b;", torch.int32, high, low).view(dtype).view(-1, 2)
    expected = [
        [nearest(Fraction(x), kind[:-2], "rz") for x in both] for both in zip(low.tolist(), high.tolist(), strict=True)
    ]
    assert towards_zero.tolist() == expected


def test_tf32() -> None:
    """Checks rounding to ten mantissa bits: .rna rounds ties away from zero, .rn to even."""
    values = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12, math.inf])
    away = evaluate("cvt.rna.tf32.f32 %d, %a;", torch.float32, values)
    assert away.tolist() == [1 + 2.0**-10, 1 + 2.0**-9, -1 - 2.0**-10, 1, math.inf]
    even = evaluate("cvt.rn.tf32.f32 %d, %a;", torch.float32, values, target="sm_90")
    assert even.tolist() == [1, 1 + 2.0**-9, -1, 1, math.inf]


@pytest.mark.parametrize(("kind", "bits"), [("16", 16), ("8", 8), ("4", 4), ("2", 2)])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_pack(kind: str, bits: int, sign: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    a, b = (torch.randint(-70000, 70000, (32,), generator=generator, dtype=torch.int32) for _ in range(2))
    a[:16] %= 7
    c = torch.randint(0, 2**31 - 1, (32,), generator=generator, dtype=torch.int32)
    upper = "" if bits == 16 else ", %c"
    types = f"{sign}{kind}.s32" + ("" if bits == 16 else ".b32")
    got = evaluate(f"cvt.pack.sat.{types} %d, %a, %b{upper};", torch.int32, a, b, c)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if sign == "s" else (0, 2**bits - 1)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        fields = [max(low, min(high, value)) % 2**bits for value in (y, x)]
        expected = fields[0] | fields[1] << bits | (0 if bits == 16 else z << 2 * bits)
        assert result % 2**32 == expected % 2**32
