"""Tests of conversions of all fp8 numbers against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator import Module
from expected_errors import failing
from ptx_body import evaluate

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


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
        body = f"cvt.rn.satfinite{relu}.{kind}x2.f32 %h1, %a, %b; cvt.u32.u16 %d, %h1;"
        got = evaluate(body, torch.int32, numbers, other, target="sm_90")
        expected = [saturated(torch.where(x < 0, torch.tensor(0.0), x) if relu else x, kind) for x in (numbers, other)]
        assert torch.equal(got, expected[0] << 8 | expected[1])  # the first source is the upper half


@pytest.mark.parametrize("kind", DTYPES)
def test_from_every_half(kind: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    halves = bits.to(torch.uint16).view(torch.float16)
    pairs = bits << 16 | bits.flip(0)
    body = f"cvt.rn.satfinite.{kind}x2.f16x2 %h1, %a; cvt.u32.u16 %d, %h1;"
    got = evaluate(body, torch.int32, pairs, target="sm_90")
    expected = saturated(halves, kind)
    assert torch.equal(got, expected << 8 | expected.flip(0))


@pytest.mark.parametrize("kind", DTYPES)
def test_every_number_to_half(kind: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    pairs = numbers.int() << 8 | numbers.flip(0).int()
    for relu in ("", ".relu"):
        body = f"cvt.u16.u32 %h1, %a; cvt.rn{relu}.f16x2.{kind}x2 %d, %h1;"
        got = evaluate(body, torch.int32, pairs, target="sm_90")
        wide = numbers.view(DTYPES[kind]).float()
        if relu:
            wide = torch.where(wide < 0, torch.tensor(0.0), wide)
        high, low = ((x & 0xFFFF).to(torch.uint16).view(torch.float16) for x in (got >> 16, got))
        for part, expected in ((high, wide), (low, wide.flip(0))):
            assert torch.equal(part.isnan(), expected.isnan())
            assert torch.equal(part.float().nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


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
    with failing("unsupported"):
        Module(f"{text} .reg .f32 %f<3>; {instruction} ret; }}").parameters("k")
