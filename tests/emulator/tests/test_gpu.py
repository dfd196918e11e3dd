"""Tests that the same PTX gives the same bits on the emulator and on a GPU, or results within a bound.

Without a GPU, each case runs on the emulator only and its PTX is compiled by ptxas. The comparison is tested with wrong
results, and launches through the driver API with a fake driver, which runs kernels on the emulator.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpu_cases
import gpu_matrix_cases
from emulator import Module, static_facts
from emulator.toolkit import nvcc
from fake_driver import FakeDriver, fake
from gpu_cases import ATOMICS, CASES, CTAS, RESULTS, THREADS, AtomicCase, Bound, Case
from gpu_driver import Driver, driver, has_gpu_for
from gpu_matrix_cases import MATRIX_CASES, MatrixCase

__all__ = ["fake"]  # the fixture

SEED = 20


# --- Comparisons ------------------------------------------------------------------------------------------------------


def worst(name: str, got: Tensor, expected: Tensor, excess: Tensor) -> str:
    """Returns a message about the element with the largest ``excess``."""
    place = int(excess.flatten().double().argmax())
    return f"{name}: at {place} the GPU has {got.flatten()[place]}, the emulator {expected.flatten()[place]}"


def check(name: str, got: Tensor, expected: Tensor, bound: Bound | None) -> None:
    """Checks a GPU's result against the emulator's, which is the exact result rounded once. With ``bound`` None, bits
    must be equal, but any NaN equals any other."""
    if got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), expected.isnan()), worst(name, got, expected, got.isnan() ^ expected.isnan())
        got, expected = got.nan_to_num(nan=0.0, posinf=None, neginf=None), expected.nan_to_num(nan=0.0)
    if bound is None:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
        differs = got.view(bits) != expected.view(bits)
        assert not differs.any(), worst(name, got, expected, differs)
        return
    limits = torch.finfo(got.dtype)
    size = expected.double().abs()
    ulp = torch.exp2(size.clamp(min=limits.tiny).log2().floor()) * limits.eps
    allowed = bound.relative * size + (bound.ulps + 0.5) * ulp + bound.absolute
    excess = (got.double() - expected.double()).abs() - allowed
    assert (excess <= 0).all(), worst(name, got, expected, excess)


def check_sums(name: str, got: Tensor, expected: Tensor, magnitude: Tensor, bound: float) -> None:
    """Checks sums of products with an error of ``bound * magnitude`` on both sides; magnitude: sum of |a * b| + |c|."""
    excess = (got.double() - expected.double()).abs() - 2 * bound * magnitude.double()
    assert (excess <= 0).all(), worst(name, got, expected, excess)


# --- Cases ------------------------------------------------------------------------------------------------------------


def operands_of(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    a, b, c = (gpu_cases.operand(case.operands, case.domain, generator) for _ in range(3))
    b[::7] = a[::7]  # equal operands, for comparisons
    return [a, b, c]


def results_of(case: Case, words: Tensor) -> Tensor:
    """Returns the stored words as numbers of the result's type."""
    numbers = words.view(RESULTS[case.result][1])
    used = {"f32": (2, 1), "f16": (4, 1), "bf16": (4, 1), "f16x2": (4, 2), "bf16x2": (4, 2)}
    of, count = used.get(case.result, (1, 1))
    return numbers.view(-1, of)[:, :count].contiguous()


def launched(case: Case, on: Any) -> Tensor:
    out = torch.zeros(THREADS * CTAS, dtype=torch.int64)
    on(Module(case.ptx()), "k", (CTAS,), (THREADS,), [*operands_of(case), out])
    return results_of(case, out)


def emulated(module: Module, *arguments: Any, **options: Any) -> None:
    module.launch(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_instructions(case: Case) -> None:
    expected = launched(case, emulated)
    assert len(expected.nan_to_num().unique() if expected.dtype.is_floating_point else expected.unique()) > 1
    if has_gpu_for(case.target):
        check(str(case), launched(case, driver().launch), expected, case.bound)


def cells_after(case: AtomicCase, on: Any) -> Tensor:
    cells = torch.zeros(8, 4, dtype=torch.int32)
    on(Module(case.ptx()), "k", (CTAS,), (THREADS,), [cells])
    return cells


@pytest.mark.gpu
@pytest.mark.parametrize("case", ATOMICS, ids=str)
def test_atomics_leave_the_same_in_any_order(case: AtomicCase) -> None:
    expected = cells_after(case, emulated)
    assert all(torch.equal(cells_after(case, functools.partial(emulated, seed=seed)), expected) for seed in range(1, 4))
    if has_gpu_for(case.target):
        check(str(case), cells_after(case, driver().launch), expected, None)


def product(case: MatrixCase, on: Any, function: Any = None) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    inputs = gpu_matrix_cases.fragments(case, generator, function or (lambda numbers: numbers))
    out = torch.zeros(case.registers[3], 32, dtype=torch.int32)
    on(Module(case.ptx()), "k", (1,), (32,), [inputs, out])
    return out.view(gpu_matrix_cases.FORMATS[case.sum_kind])


@pytest.mark.gpu
@pytest.mark.parametrize("case", MATRIX_CASES, ids=str)
def test_tensor_cores(case: MatrixCase) -> None:
    expected = product(case, emulated)
    assert len(expected.double().unique()) > expected.numel() // 2
    got = product(case, driver().launch) if has_gpu_for(case.target) else expected
    if case.bound is None:
        check(str(case), got, expected, None)
        return
    magnitude = product(case, emulated, torch.abs)
    assert (expected.double().abs() <= (1 + case.bound) * magnitude.double()).all()
    check_sums(str(case), got, expected, magnitude, case.bound)


# The emulator's half of the test is a separate process, because a process has either its library or the GPU's.
EMULATED_ATTENTION = """
import sys
from emulator import allocations, device, native_library, options

assert native_library.import_fastattn()
import fastattn
import torch

with device.emulated(), options.launching(seed=3):
    query, key, value = torch.load(sys.argv[1])
    with fastattn.use_backend("cuda"):
        torch.save(fastattn.attention(query, key, value, causal=True, return_lse=True), sys.argv[1])
"""


def emulated_attention(tensors: list[Tensor], folder: Path) -> tuple[Tensor, Tensor]:
    file = folder / "tensors.pt"
    torch.save(tensors, file)
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *(path for path in sys.path if path)])}
    subprocess.run([sys.executable, "-c", EMULATED_ATTENTION, file], env=environment, check=True)
    out, lse = torch.load(file)
    return out, lse


def attention_inputs(head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shapes = (2, 200), (1, 300), (1, 300)
    return [torch.randn(1, *shape, head_dim, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or nvcc() is None, reason="needs a GPU and nvcc")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_native_forward_kernel(head_dim: int, tmp_path: Path) -> None:
    """Checks a bf16 causal kernel with several tiles. Rounding probabilities to bf16 causes most of the difference."""
    import fastattn

    tensors = attention_inputs(head_dim)
    out, lse = emulated_attention(tensors, tmp_path)
    query, key, value = (tensor.cuda() for tensor in tensors)
    with fastattn.use_backend("cuda"):
        got, got_lse = fastattn.attention(query, key, value, causal=True, return_lse=True)
    check("out", got.cpu(), out, Bound(relative=2**-6, absolute=2**-8))
    check("lse", got_lse.cpu(), lse, Bound(absolute=2**-14))


# --- Tests of these tests, without a GPU ------------------------------------------------------------------------------

ALL = [*CASES, *ATOMICS, *MATRIX_CASES]


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_the_emulated_half_of_the_native_kernel_is_attention(tmp_path: Path) -> None:
    from fastattn import reference

    tensors = attention_inputs(64)
    expected = reference.attention(*tensors, causal=True)
    for found, right in zip(emulated_attention(tensors, tmp_path), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2**-6, atol=2**-7)


@pytest.mark.skipif(not static_facts.has_tools(), reason="needs ptxas")
def test_ptxas_takes_all_of_it(tmp_path: Path) -> None:
    """Compiles all kernels of a target in one file, under different names."""
    for target in sorted({case.target for case in ALL}):
        parts = [case.ptx() for case in ALL if case.target == target]
        bodies = [part.split(".visible", 1)[1].replace(".entry k(", f".entry k{i}(") for i, part in enumerate(parts)]
        source = tmp_path / f"{target}.ptx"
        head = gpu_cases.HEADER.format(version="8.4", target=target)
        source.write_text(head + "".join(f".visible {body}" for body in bodies))
        static_facts.run("ptxas", f"-arch={target}", source, "-o", tmp_path / "cubin")


def test_the_comparison_sees_differences() -> None:
    exact = torch.tensor([1.0, -2.0, torch.nan, torch.inf, 1e-40])
    check("same", exact, exact.clone(), None)
    for place, wrong in ((0, 1.0 + 2**-23), (1, 2.0), (2, 0.0), (3, 3.4e38), (4, 0.0)):
        other = exact.clone()
        other[place] = wrong
        with pytest.raises(AssertionError, match=f"at {place} "):
            check("other", other, exact, None)
    numbers = torch.tensor([1.5, 1000.0])
    for bound, off in ((Bound(ulps=1), 2**-23), (Bound(relative=2**-10), 1.4 * 2**-10), (Bound(absolute=0.5), 0.49)):
        check("near", numbers + off, numbers, bound)
        with pytest.raises(AssertionError):
            check("far", numbers + torch.tensor([2.5 * off, 0.0]), numbers, bound)
    check_sums("near", numbers + 0.1, numbers, torch.tensor([10.0, 1000.0]), 2**-7)
    with pytest.raises(AssertionError):
        check_sums("far", numbers + 0.2, numbers, torch.tensor([10.0, 1000.0]), 2**-7)


def test_launches_through_the_drivers_functions(fake: tuple[Driver, FakeDriver]) -> None:
    driver, library = fake
    for case in (CASES[0], next(case for case in CASES if case.name.startswith("ldmatrix"))):
        check(str(case), launched(case, driver.launch), launched(case, emulated), None)
    assert library.launches == [(CTAS, 1, 1, THREADS, 1, 1, 0)] * 2 and not library.modules


STRUCT = """.version 8.0\n.target sm_80\n.address_size 64
.visible .entry k(.param .u32 add, .param .align 8 .b8 s[20])
{
    .reg .b32 %r<4>; .reg .b64 %rd<3>;
    mov.u32 %r0, %tid.x; ld.param.u32 %r1, [add]; ld.param.u64 %rd0, [s+8]; ld.param.u32 %r2, [s+16];
    add.s32 %r1, %r1, %r2; mul.wide.u32 %rd1, %r0, 8; add.s64 %rd0, %rd0, %rd1; st.global.u32 [%rd0], %r1;
    ret;
}"""


def test_structs_and_strides(fake: tuple[Driver, FakeDriver]) -> None:
    """Checks that pointers in structs are replaced by those of the copies, and that copies keep strides."""
    driver, _ = fake
    out = torch.zeros(8, 2, dtype=torch.int32)[:, 0]
    pointer = out.data_ptr().to_bytes(8, "little")
    driver.launch(Module(STRUCT), "k", (1,), (8,), [3, bytes(8) + pointer + (40).to_bytes(4, "little")], memory=[out])
    assert out.tolist() == [43] * 8


def test_errors_say_what_the_driver_says(fake: tuple[Driver, FakeDriver]) -> None:
    with pytest.raises(
        RuntimeError, match=r"cuModuleLoadDataEx: a PTX JIT compilation failed \(218\)\nline 1: nonsense"
    ):
        fake[0].load("nonsense")
