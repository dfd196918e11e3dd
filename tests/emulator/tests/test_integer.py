"""Tests of integer instructions against the manual's definitions, written down in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ptx_body import evaluate

DTYPES = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def integers(bits: int, seed: int, count: int = 96) -> Tensor:
    """Returns random integers, small integers, and the extremes."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(DTYPES[bits])
    values = torch.randint(info.min, info.max, (count,), generator=generator)
    values[::3] = torch.randint(-40, 41, (len(values[::3]),), generator=generator)
    values[:6] = torch.tensor([0, -1, 1, info.min, info.max, info.min + 1])
    return values[torch.randperm(count, generator=generator)].to(DTYPES[bits])


def unsigned(value: int, bits: int) -> int:
    return value % (1 << bits)


def signed(value: int, bits: int) -> int:
    return unsigned(value + (1 << bits - 1), bits) - (1 << bits - 1)


def check(body: str, function: Callable[..., int], kinds: str, bits: int = 32, target: str = "sm_80") -> None:
    """Checks a body against ``function``, modulo 2^bits. ``kinds`` is s or u for each source: signed or unsigned."""
    sources = [integers(bits, seed) for seed in range(len(kinds))]
    got = evaluate(body, DTYPES[bits], *sources, target=target)
    for *values, result in zip(*(source.tolist() for source in sources), got.tolist(), strict=True):
        seen = [(signed if kind == "s" else unsigned)(x, bits) for kind, x in zip(kinds, values, strict=True)]
        assert unsigned(result, bits) == unsigned(function(*seen), bits), (body, seen)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", ["u", "s"])
def test_carry_chains(bits: int, kind: str) -> None:
    """Checks sums, differences and products of twice the width, which two instructions with a carry compute."""
    low_a, high_a, low_b, high_b = (integers(bits, seed) for seed in range(4))
    wide = 2 * bits

    def whole(high: int, low: int) -> int:
        return unsigned(high, bits) << bits | unsigned(low, bits)

    def run(first: str, second: str) -> list[int]:
        halves = []
        for result in ("%t0" if bits == 32 else "%l1", "%t1" if bits == 32 else "%l2"):
            low, high = ("%t0", "%t1") if bits == 32 else ("%l1", "%l2")
            body = f"{first.format(d=low)} {second.format(d=high)} mov.b{bits} %d, {result};"
            halves.append(evaluate(body, DTYPES[bits], low_a, high_a, low_b, high_b))
        return [whole(high, low) for low, high in zip(*(half.tolist() for half in halves), strict=True)]

    t = f"{kind}{bits}"
    values = list(zip(*(x.tolist() for x in (low_a, high_a, low_b, high_b)), strict=True))
    a = [whole(high, low) for low, high, _, _ in values]
    b = [whole(high, low) for _, _, low, high in values]
    sums = run(f"add.cc.{t} {{d}}, %a, %c;", f"addc.{t} {{d}}, %b, %e;")
    assert sums == [unsigned(x + y, wide) for x, y in zip(a, b, strict=True)]
    differences = run(f"sub.cc.{t} {{d}}, %a, %c;", f"subc.{t} {{d}}, %b, %e;")
    assert differences == [unsigned(x - y, wide) for x, y in zip(a, b, strict=True)]
    products = run(f"mad.lo.cc.{t} {{d}}, %a, %c, %b;", f"madc.hi.{t} {{d}}, %a, %c, %e;")
    cast = signed if kind == "s" else unsigned
    for (x, c_low, y, c_high), got in zip(values, products, strict=True):
        assert got == unsigned(cast(x, bits) * cast(y, bits) + whole(c_high, c_low), wide)


def test_carry_of_three_words() -> None:
    """Checks that addc.cc both reads and writes the flag."""
    a, b = integers(32, 1), integers(32, 2)
    body = "add.cc.u32 %t0, %a, %b; addc.cc.u32 %t1, %a, %b; addc.u32 %d, 0, 0;"
    got = evaluate(body, torch.int32, a, b)
    for x, y, carry in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        total = unsigned(x, 32) * (2**32 + 1) + unsigned(y, 32) * (2**32 + 1)
        assert carry == total >> 64


def clamp(value: int) -> int:
    return max(-(2**31), min(2**31 - 1, value))


def field(value: int, bits: int, kind: str) -> int:
    return (signed if kind == "s" else unsigned)(value, bits)


@pytest.mark.parametrize("a_kind", ["u", "s"])
@pytest.mark.parametrize("b_kind", ["u", "s"])
def test_dot_products(a_kind: str, b_kind: str) -> None:
    types = f"{a_kind}32.{b_kind}32"

    def dot(a: int, b: int, c: int, width: int, places: list[tuple[int, int]]) -> int:
        return c + sum(field(a >> width * i, width, a_kind) * field(b >> 8 * j, 8, b_kind) for i, j in places)

    check(f"dp4a.{types} %d, %a, %b, %c;", lambda a, b, c: dot(a, b, c, 8, [(i, i) for i in range(4)]), "uuu")


def extended(a: int, length: int, is_signed: bool) -> int:
    if length >= 32:
        return a
    return signed(a, length) if is_signed and length > 0 else a % (1 << length)


def mask_of(first: int, length: int) -> int:
    return ((1 << min(length, 64)) - 1) << first if first < 32 else 0


def lop3(table: int) -> Callable[..., int]:
    return lambda a, b, c: sum(
        1 << i for i in range(32) if table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1
    )


def prmt(a: int, b: int, selectors: int) -> int:
    chosen = []
    for i in range(4):
        select = selectors >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (select & 7) & 255
        chosen.append((255 if byte & 128 else 0) if select & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


PERMUTATIONS = {
    "f4e": [0x3210, 0x4321, 0x5432, 0x6543],
    "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
    "rc8": [0x0000, 0x1111, 0x2222, 0x3333],
    "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
    "ecr": [0x0000, 0x1110, 0x2210, 0x3210],
    "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
}


@pytest.mark.parametrize(
    ("body", "function", "kinds"),
    [
        ("sad.u32 %d, %a, %b, %c;", lambda a, b, c: abs(a - b) + c, "uuu"),
        ("sad.s32 %d, %a, %b, %c;", lambda a, b, c: abs(a - b) + c, "sss"),
        ("mad.hi.sat.s32 %d, %a, %b, %c;", lambda a, b, c: clamp((a * b >> 32) + c), "sss"),
        ("add.sat.s32 %d, %a, %b;", lambda a, b: clamp(a + b), "ss"),
        ("sub.sat.s32 %d, %a, %b;", lambda a, b: clamp(a - b), "ss"),
        ("bmsk.clamp.b32 %d, %a, %b;", mask_of, "uu"),
        ("bmsk.wrap.b32 %d, %a, %b;", lambda a, b: mask_of(a % 32, b % 32), "uu"),
        ("szext.clamp.s32 %d, %a, %b;", lambda a, b: extended(a, b, True), "uu"),
        ("szext.wrap.s32 %d, %a, %b;", lambda a, b: extended(a, b % 32, True), "uu"),
        ("szext.clamp.u32 %d, %a, %b;", lambda a, b: extended(a, b, False), "uu"),
        ("bfe.s32 %d, %a, 4, 8;", lambda a: signed(a >> 4, 8), "s"),
        ("bfi.b32 %d, %a, 0, 8, 4;", lambda a: (a & 15) << 8, "u"),
        ("div.s32 %d, %a, 3;", lambda a: abs(a) // 3 * (1 if a >= 0 else -1), "s"),
        ("rem.s32 %d, %a, 3;", lambda a: abs(a) % 3 * (1 if a >= 0 else -1), "s"),
        ("shr.s32 %d, %a, 40;", lambda a: a >> 31, "s"),
        ("shl.b32 %d, %a, 40;", lambda a: 0, "u"),
        ("clz.b32 %d, %a;", lambda a: 32 - a.bit_length(), "u"),
        ("popc.b32 %d, %a;", int.bit_count, "u"),
        ("brev.b32 %d, %a;", lambda a: int(f"{a:032b}"[::-1], 2), "u"),
        ("bfind.u32 %d, %a;", lambda a: a.bit_length() - 1, "u"),
        ("bfind.s32 %d, %a;", lambda a: (a if a >= 0 else ~a).bit_length() - 1, "s"),
        ("bfind.shiftamt.u32 %d, %a;", lambda a: 32 - a.bit_length() if a else -1, "u"),
        ("lop3.b32 %d, %a, %b, %c, 0xE8;", lop3(0xE8), "uuu"),
        ("lop3.b32 %d, %a, %b, %c, 0x1B;", lop3(0x1B), "uuu"),
        ("setp.lt.s32 %p0, %c, 0; lop3.and.b32 %t0|%p1, %a, %b, 31, 0x80, %p0; selp.b32 %d, %t0, -1, %p1;",
         lambda a, b, c: a & b & 31 if c >= 2**31 and a & b & 31 else -1, "uuu"),
        ("setp.lt.s32 %p0, %c, 0; lop3.or.b32 _|%p1, %a, %b, 31, 0x80, !%p0; selp.b32 %d, 1, 0, %p1;",
         lambda a, b, c: a & b & 31 != 0 or c < 2**31, "uuu"),
        ("prmt.b32 %d, %a, %b, %c;", prmt, "uuu"),
        *[(f"prmt.b32.{mode} %d, %a, %b, %c;", lambda a, b, c, table=table: prmt(a, b, table[c & 3]), "uuu")
          for mode, table in PERMUTATIONS.items()],
        ("shf.l.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) << c % 32 >> 32, "uuu"),
        ("shf.r.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) >> c % 32, "uuu"),
        ("shf.l.clamp.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32, "uuu"),
        ("shf.r.clamp.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) >> min(c, 32), "uuu"),
    ],
)  # fmt: skip
def test_definitions(body: str, function: Callable[..., int], kinds: str) -> None:
    check(body, function, kinds)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("kind", ["u", "s"])
def test_widths(bits: int, kind: str) -> None:
    check(f"sad.{kind}{bits} %d, %a, %b, %c;", lambda a, b, c: abs(a - b) + c, kind * 3, bits)
    check(f"max.{kind}{bits} %d, %a, %b;", max, kind * 2, bits)
    check(f"mul.hi.{kind}{bits} %d, %a, %b;", lambda a, b: a * b >> bits, kind * 2, bits)


def by_halves(function: Callable[..., int], kind: str) -> Callable[..., int]:
    def both(*words: int) -> int:
        low, high = (function(*(field(word >> 16 * i, 16, kind) for word in words)) for i in (0, 1))
        return unsigned(low, 16) | unsigned(high, 16) << 16

    return both


def test_hopper_extremes_and_pairs() -> None:
    """Checks pairs of 16-bit integers and .relu, which sm_90 added."""
    cases: list[tuple[str, Any, str]] = [
        ("min.relu.s32", lambda a, b: max(0, min(a, b)), "s"),
        ("max.relu.s32", lambda a, b: max(0, a, b), "s"),
        ("add.u16x2", by_halves(lambda a, b: a + b, "u"), "u"),
        ("min.s16x2", by_halves(min, "s"), "u"),
        ("max.u16x2", by_halves(max, "u"), "u"),
        ("max.relu.s16x2", by_halves(lambda a, b: max(0, a, b), "s"), "u"),
    ]
    for opcode, function, kind in cases:
        check(f"{opcode} %d, %a, %b;", function, kind * 2, target="sm_90")
