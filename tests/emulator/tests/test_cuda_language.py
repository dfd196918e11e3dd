"""Tests of CUDA C++ kernels that use features of the language and of the toolkit's basic headers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cuda_sources import ARCHS, load, needs_nvcc
from emulator import EmulatorError
from expected_errors import failing

pytestmark = [needs_nvcc, pytest.mark.parametrize("arch", ARCHS)]


def integers(*shape: int, low: int = 0, high: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def test_printf(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    number, real, word = -7, 2.5, torch.tensor(list(b"warp\0"), dtype=torch.uint8)
    load("language", arch).launch("prints", (1,), (3,), [number, real, word])
    lines = [
        f"thread {i} of warp: {real * i:5.2f}|-7    |-7|fffffff9|{1234567890123 * number}|{chr(97 + i)}%\n"
        for i in range(3)
    ]
    assert capsys.readouterr().out == "".join(lines) + "once\n"


def test_printf_of_all_conversions(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("language", arch).launch("prints_all", (1,), (1,), [-5, 0.1, 77])
    assert capsys.readouterr().out.splitlines() == [
        "[-5] [-0005] [+3] [4294967291] [37777777773] [0xfffffffb] [FFFFFFFB]",
        "[0.100000] [1.000e-01] [0.1] [1E-01] [0x1.999999999999ap-4] [    0.10] [0.10    ]",
        "[18446744073709551611] [-5] [5] [251] [-5]",
        "[x] [text] [   tex] [text  |] [0x4d] [100%]",
    ]


def test_assert(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor([1] * 5 + [-1] * 27, dtype=torch.int32)
    with pytest.raises(EmulatorError) as caught:
        load("language", arch).launch("asserts", (1,), (32,), [values])
    error = caught.value
    assert error.kind == "assert" and error.thread == (5, 0, 0)
    assert "language.cu" in error.message and "void asserts(const int *)" in error.message
    assert 'assertion `values[threadIdx.x] >= 0 && "negative"` failed' in error.message
    assert error.source is not None and "language.cu:" in error.source
    load("language", arch).launch("asserts", (1,), (32,), [values.abs()])


def test_virtual_calls(arch: str) -> None:
    sides, out = torch.arange(32.0), torch.zeros(32)
    load("language", arch).launch("areas", (1,), (32,), [sides, out])
    assert torch.equal(out, torch.where(torch.arange(32) % 3 == 0, sides * 10, sides * sides))


def test_calls_through_pointers_and_initial_values(arch: str) -> None:
    which, out = integers(32, high=3), torch.zeros(32, dtype=torch.int32)
    for seed in range(3):
        load("language", arch).launch("through_pointers", (1,), (32,), [which, out], seed=seed)
        i = torch.arange(32)
        results = torch.stack([2 * i, -i, i * i])[which, i]
        assert torch.equal(out, (results + torch.tensor([10, 20, 30, 40])[i % 4] + 3).int())


def test_recursion(arch: str) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    load("language", arch).launch("recursion", (1,), (32,), [out])
    assert out[:10].tolist() == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]


def test_recursion_without_an_end(arch: str) -> None:
    with failing("limit", "recursion without an end"):
        load("language", arch).launch("endless", (1,), (1,), [torch.ones(1, dtype=torch.int32)])
    load("language", arch).launch("endless", (1,), (1,), [torch.zeros(1, dtype=torch.int32)])


def test_malloc_in_device_code(arch: str) -> None:
    with pytest.raises(EmulatorError, match="malloc in device code: there is no heap"):
        load("language", arch).launch("allocates", (1,), (1,), [torch.zeros(1)])


def test_dynamic_shared_memory(arch: str) -> None:
    source, out = torch.arange(64.0), torch.zeros(64)
    load("language", arch).launch("reversed", (1,), (64,), [source, out], shared_bytes=256)
    assert torch.equal(out, source.flip(0) + 100)


def test_warp_intrinsics(arch: str) -> None:
    values = integers(32, low=-3, high=12, seed=1)
    out = torch.zeros(13, 32, dtype=torch.int32)
    load("language", arch).launch("warp_intrinsics", (1,), (32,), [values, out])
    lane, v = np.arange(32), values.numpy()

    def mask(bits: np.ndarray) -> int:
        return sum(1 << int(i) for i in np.flatnonzero(bits))

    def dot(x: int) -> int:
        bytes_of = np.frombuffer(np.int32((x * 0x01010101 + 2**31) % 2**32 - 2**31).tobytes(), np.int8)
        return int(sum(int(b) * (i + 1) for i, b in enumerate(bytes_of))) + 5

    def bytewise(x: int) -> int:
        return int.from_bytes(bytes((b + 1) % 256 for b in (x % 2**32).to_bytes(4, "little")), "little")

    big = v > 3
    expected = [
        np.where(lane >= 3, np.roll(v, 3), v),
        np.where(lane % 16 + 5 < 16, np.roll(v, -5), v),
        v[lane ^ 9],
        [mask(v == x) for x in v],
        [(2**32 - 1 if (v & 1 | 1 == v & 1 | 1).all() else 0) + 1] * 32,
        [mask(big) + 32] * 32,
        [v.sum()] * 32,
        [v.max() - v.min()] * 32,
        [np.bitwise_xor.reduce(v.astype(np.uint32))] * 32,
        [big.sum() * 4 + bool(big.all()) * 2 + bool(big.any())] * 32,
        [2 + bool((v == 77).any())] * 32,
        [ffs(int(x)) + (32 - (int(x) % 2**32).bit_length()) * 100 + reverse(int(x)) % 7 for x in v],
        [dot(int(x)) + bytewise(int(x)) + abs(int(x) - 9) + 2 for x in v],
    ]
    for row, (got, wanted) in enumerate(zip(out.tolist(), expected, strict=True)):
        assert [x % 2**32 for x in got] == [int(x) % 2**32 for x in wanted], row


def ffs(x: int) -> int:
    return (x & -x).bit_length()


def reverse(x: int) -> int:
    return int(f"{x % 2**32:032b}"[::-1], 2)


def close(got: Tensor, exact: Tensor, units: float) -> bool:
    """Returns True if all errors are within ``units`` units in the last place of ``got``'s type."""
    info = torch.finfo(got.dtype)
    bound = units * info.eps * exact.abs().clamp(min=info.tiny)
    return bool(((got.double() - exact).abs() <= bound).all())


def test_pairs_of_halves(arch: str) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(64, generator=generator).half() for _ in range(2))
    c, d = (torch.randn(64, generator=generator).bfloat16() for _ in range(2))
    c[::5], a[::5] = d[::5], b[::5]
    out, out_bfloat = torch.zeros(11, 64).half(), torch.zeros(6, 64).bfloat16()
    load("language", arch).launch("pairs", (1,), (32,), [a, b, out, c, d, out_bfloat])
    fma = (a.double() * b.double() + a.double()).half()
    exact = [a + b, (a * b).clamp(0, 1), fma, torch.maximum(a, b), (a > b).half(), None, a.abs(), fma.clamp(min=0)]
    for row, expected in enumerate([*exact, a.float().round().half()]):
        assert expected is None or torch.equal(out[row], expected), row
    assert close(out[5], a.double().exp2(), 1)
    assert close(out[9], a.double() / b.double(), 1)
    assert close(out[10], a.abs().double().sqrt(), 1)
    fma_bfloat = (c.double() * d.double() + c.double()).bfloat16()
    rows = [c + d, c * d, fma_bfloat, torch.minimum(c, d), (c >= d).bfloat16(), c - d]
    for row, expected in enumerate(rows):
        assert torch.equal(out_bfloat[row], expected), row


def test_rounding_intrinsics_and_functions(arch: str) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b, c = (torch.randn(32, generator=generator) for _ in range(3))
    out = torch.zeros(10, 32)
    load("language", arch).launch("rounding", (1,), (32,), [a, b, c, out])
    x, y, z = a.double(), b.double(), c.double()
    # Sums and products of these numbers are exact in fp64. Quotients and roots are not close to an fp32 number.
    exact = [x + y, x + y, x * y, x * y + z, x / y, x.abs().sqrt(), 1 / x]
    for row, (value, mode) in enumerate(zip(exact, ["rz", "ru", "rd", "rz", "rd", "ru", "rz"], strict=True)):
        nearest = value.float()
        below = torch.where(nearest.double() > value, nearest.nextafter(torch.tensor(-math.inf)), nearest)
        above = torch.where(nearest.double() < value, nearest.nextafter(torch.tensor(math.inf)), nearest)
        towards_zero = torch.where(value > 0, below, above)
        assert torch.equal(out[row], {"rz": towards_zero, "ru": above, "rd": below}[mode]), row
    assert torch.equal(out[7], a.clamp(0, 1))
    functions = x.exp() + y.sin() + torch.erf(z) + x.abs() ** y
    assert torch.allclose(out[8].double(), functions, rtol=2e-6, atol=2e-6)
    assert torch.allclose(out[9].double(), x * y + z + x.exp(), rtol=1e-6)
