"""Tests that Triton's kernels for an emulated GPU are freed after the GPU's block."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not on the emulator")

from emulator import device  # noqa: E402
from triton_programs import softmax_kernel  # noqa: E402


def launch() -> Any:
    """Launches a kernel, and returns Triton's compiled kernel."""
    x = torch.randn(5, 300)
    out = torch.empty(5, 300)
    kernel = softmax_kernel[(5,)](x, out, 300, BLOCK=512)
    torch.testing.assert_close(out, x.softmax(-1), rtol=1e-5, atol=1e-7)
    return kernel


def test_kernels_go_with_the_outermost_gpu() -> None:
    with device.emulated(80):
        kernel = weakref.ref(launch())
        with device.emulated(90):
            other = weakref.ref(launch())
        assert kernel() is not None and other() is not None
        assert launch() is kernel()
    gc.collect()
    assert kernel() is None and other() is None


def test_a_kernel_runs_again_on_the_next_gpu() -> None:
    for _ in range(2):
        with device.emulated(80):
            launch()
