"""Tests that wgmma and tensor copies give the same results on the emulator and on a Hopper GPU. See test_gpu."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import emulator_wgmma
import test_tma as tma
import test_wgmma as wgmma
from emulator import Module, TensorMap
from emulator_tma import build
from fake_driver import FakeDriver, fake
from gpu_driver import Driver, driver, has_gpu_for
from test_gpu import check, check_sums

__all__ = ["fake"]  # the fixture

on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu_for("sm_90a"), reason="needs a Hopper GPU")]

# Bounds of |error| / (sum of |a * b| + |c|), see gpu_matrix_cases; K is 32 bytes.
BOUNDS = {"f16": 17 * 2**-23, "bf16": 17 * 2**-23, "tf32": 9 * 2**-23, "e4m3": 33 * 2**-13, "e5m2": 33 * 2**-13}


def on_driver(monkeypatch: pytest.MonkeyPatch, which: Driver) -> None:
    """Sends every launch of the test to a driver."""

    def launch(module: Module, name: str, grid: Any, block: Any, args: Any, shared_bytes: int = 0, **_: Any) -> Any:
        which.launch(module, name, grid, block, args, shared_bytes)

    monkeypatch.setattr(Module, "launch", launch)


def drawn(types: tuple[str, str, str], case: int) -> emulator_wgmma.Form:
    return wgmma.draw_form(random.Random(f"{types} {case}"), *types)


def roundings(form: emulator_wgmma.Form, case: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A, B and C with random numbers, whose sums must be rounded."""
    generator = torch.Generator().manual_seed(case)
    shapes = ((64, form.depth), (form.columns, form.depth), (64, form.columns))
    dtypes = (emulator_wgmma.DTYPES[form.a], emulator_wgmma.DTYPES[form.b], wgmma.SUMS[form.sum])
    a, b, c = (torch.randn(*s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True))
    return a, b, c


@pytest.mark.parametrize("types", [pytest.param(types, marks=on_hopper) for types in wgmma.TYPES], ids="-".join)
def test_wgmma(types: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks exact sums of integers in four shapes, and rounded sums within the bound."""
    forms = [drawn(types, case) for case in range(4)]
    inputs = [wgmma.matrices(form, torch.Generator().manual_seed(i), -4, 5) for i, form in enumerate(forms)]
    rounded = [(forms[0], roundings(forms[0], 0))] if types[2] == "f32" else []
    problems = [*zip(forms, inputs, strict=True), *rounded]
    expected = [emulator_wgmma.run(form, *matrices)[0] for form, matrices in problems]
    on_driver(monkeypatch, driver())
    got = [emulator_wgmma.run(form, *matrices)[0] for form, matrices in problems]
    for i, form in enumerate(forms):
        check(str(form), got[i], expected[i], None)
    for form, (a, b, c) in rounded:
        magnitude = a.double().abs() @ b.double().abs().T + c.double().abs()
        check_sums(str(form), got[-1], expected[-1], magnitude, BOUNDS[form.a])


def loaded(which: Any, dtype: torch.dtype, swizzle: str, at: tuple[int, int]) -> Tensor:
    """Returns shared memory after a copy of a box of 16 rows of 32 to 128 bytes from a tensor with 20 rows."""
    columns = {"none": 64, "32B": 32, "64B": 64, "128B": 128}[swizzle] // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(20, columns + 16, generator=generator).to(dtype)
    size = 16 * columns * dtype.itemsize
    module = build(tma.load_body(2, size, size), size, integers=2)
    out = torch.zeros(size, dtype=torch.uint8)
    map = TensorMap(tensor, (16, columns), swizzle, fill="nan" if dtype.is_floating_point else "zero")
    which(module, "k", (1,), (32,), [map, out, *at])
    return out


COPIES = [
    (dtype, swizzle, at)
    for dtype in (torch.bfloat16, torch.float32)
    for swizzle in tma.SWIZZLES
    for at in ((0, 0), (7, 3), (-3, 9))
]


def emulated(module: Module, *arguments: Any) -> None:
    module.launch(*arguments)


@pytest.mark.parametrize("swizzle", [pytest.param(swizzle, marks=on_hopper) for swizzle in tma.SWIZZLES])
def test_tensor_copies(swizzle: str) -> None:
    for dtype, _, at in (case for case in COPIES if case[1] == swizzle):
        got = loaded(driver().launch, dtype, swizzle, at)
        check(f"{dtype} at {at}", got.view(dtype), loaded(emulated, dtype, swizzle, at).view(dtype), None)


# --- Tests of these tests, without a GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "swizzle", "at"), COPIES[::5])
def test_maps_through_the_drivers_function(
    dtype: torch.dtype, swizzle: str, at: tuple[int, int], fake: tuple[Driver, FakeDriver]
) -> None:
    got = loaded(fake[0].launch, dtype, swizzle, at)
    check("box", got.view(dtype), loaded(emulated, dtype, swizzle, at).view(dtype), None)
    assert len(got.unique()) > 16


def test_products_through_the_drivers_functions(
    fake: tuple[Driver, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = drawn(("bf16", "bf16", "f32"), 0)
    inputs = roundings(form, 0)
    expected, _ = emulator_wgmma.run(form, *inputs)
    of_emulator = Module.launch

    def launch(module: Module, name: str, grid: Any, block: Any, args: Any, shared_bytes: int = 0, **more: Any) -> Any:
        if "tracked" in more:  # a launch by the fake driver
            return of_emulator(module, name, grid, block, args, shared_bytes, **more)
        return fake[0].launch(module, name, grid, block, args, shared_bytes)

    monkeypatch.setattr(Module, "launch", launch)
    check("product", emulator_wgmma.run(form, *inputs)[0], expected, None)
