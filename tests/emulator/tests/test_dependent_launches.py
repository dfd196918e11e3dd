"""Tests of launches that may begin before the previous one has ended, so that griddepcontrol.wait orders accesses."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_sources import load, needs_nvcc
from emulator import EmulatorError, cuda_runtime, options
from emulator.nvcc_compile import compile_library
from expected_errors import failing

pytestmark = needs_nvcc
each_seed = pytest.mark.parametrize("seed", range(5))
KIB, SIZE = 1024, ((2,), (64,))
BEFORE, AFTER, NEVER, AFTER_OF_THREAD_0 = range(4)
NOTHING, COPY, SYNCHRONIZE = range(3)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(128).int(), torch.zeros(128).int(), torch.zeros(128).int()


def run(kernel: str, *arguments: object, seed: int, dependent: bool = True) -> None:
    load("dependent", "compute_90a").launch(kernel, *SIZE, arguments, seed=seed, dependent=dependent)


def assert_race(kernel: str, *arguments: object, seed: int) -> None:
    with failing("race") as caught:
        run(kernel, *arguments, seed=seed)
    assert "by first, the launch before" in caught.value.message and "griddepcontrol" in caught.value.message


@each_seed
@pytest.mark.parametrize("when", [BEFORE, NEVER])
def test_accesses_before_the_wait(when: int, seed: int) -> None:
    """Checks that it is a race to read what the previous kernel writes, or to write what it reads or writes."""
    values, middle, out = tensors()
    for kernel, arguments in (
        ("reads", (middle, out, when)),
        ("writes", (middle, when)),
        ("writes", (values, when)),
    ):
        run("first", values, middle, seed=seed, dependent=False)
        assert_race(kernel, *arguments, seed=seed)
        run("first", values, middle, seed=seed, dependent=False)
        run(kernel, *arguments, seed=seed, dependent=False)


@each_seed
@pytest.mark.parametrize("when", [AFTER, AFTER_OF_THREAD_0])
def test_accesses_after_the_wait(when: int, seed: int) -> None:
    values, middle, out = tensors()
    run("first", values, middle, seed=seed, dependent=False)
    run("reads", middle, out, when, seed=seed)
    assert torch.equal(out, values + 1)
    run("first", values, middle, seed=seed, dependent=False)
    run("writes", values, when, seed=seed)


@each_seed
def test_what_is_no_conflict(seed: int) -> None:
    """Checks that reads of the same memory, accesses to separate memory, and atomics are no races."""
    values, middle, out = tensors()
    run("first", values, middle, seed=seed, dependent=False)
    run("reads", values, out, NEVER, seed=seed)
    run("counts", out, seed=seed, dependent=False)
    run("counts", out, seed=seed)
    assert out[0] == 0 + 2 * 128


@each_seed
def test_the_launch_before_the_last_one(seed: int) -> None:
    """Checks that the launch before the last has ended if the last waited for it before it let the next begin."""
    values, middle, out = tensors()
    for when in (BEFORE, NEVER, AFTER):
        run("first", values, middle, seed=seed, dependent=False)
        run("between", when, seed=seed)
        if when == AFTER:
            run("reads", middle, out, BEFORE, seed=seed)
        else:
            with pytest.raises(EmulatorError, match="race"):
                run("reads", middle, out, BEFORE, seed=seed)


@pytest.mark.parametrize("captures", [False, True])
def test_of_a_stream(captures: bool) -> None:
    """Checks the launch attribute, and other work between two kernels of a stream."""
    if not cuda_runtime.is_available:
        pytest.skip("CUDA's headers were not found")
    library = ctypes.CDLL(str(compile_library(Path(__file__).parent / "cuda" / "dependent.cu", ["compute_90a"])))
    library.error_text.restype = ctypes.c_char_p
    values, out = (ctypes.c_int * 128)(), (ctypes.c_int * 128)()
    cases = [(NEVER, True, NOTHING), (AFTER, True, NOTHING), (NEVER, False, NOTHING), (NEVER, True, COPY)]
    cases += [] if captures else [(NEVER, True, SYNCHRONIZE)]
    with cuda_runtime.pretend(90, 132, 227 * KIB):
        for when, is_dependent, between in cases:
            for seed in range(3):
                with options.launching(seed=seed):
                    error = library.run_pair(values, out, when, is_dependent, between, captures)
                is_race = (when, is_dependent, between) == (NEVER, True, NOTHING)
                text = library.error_text(error).decode()
                assert (error != 0) is is_race, text
                if is_race:
                    assert "race" in text and "griddepcontrol" in text
