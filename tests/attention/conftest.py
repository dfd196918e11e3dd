"""Holds the fixtures of the attention kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def hopper(emulated_gpu: None) -> Iterator[None]:
    """Emulates a Hopper GPU with three SMs, so that each CTA takes several tiles."""
    from cuda_kernels import EMULATED  # imports fastattn, so not before ../conftest.py has chosen its library

    if not EMULATED:
        yield
        return
    from emulator import device

    with device.emulated(90, num_sms=3):
        yield


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Emulates the GPU of a family of kernels, "sm_80" or "sm_90", or gives Triton's small tiles ("triton, its own
    tiles": no others than it has). Yields "sm_80", "sm_90" or "triton"."""
    from attention_cases import use_small_tiles
    from cuda_kernels import EMULATED, HAS_KERNELS, IS_HOPPER, NO_KERNELS
    from fastattn import native

    if request.param.startswith("triton"):
        if request.param == "triton":
            use_small_tiles(monkeypatch)
        yield "triton"
        return
    if not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    if request.param == "sm_90" and not (IS_HOPPER and "90a" in native.BUILD["archs"]):
        pytest.skip("needs kernels for sm_90a")
    if not EMULATED or request.param == "sm_80":
        yield request.param
        return
    from emulator import device

    with device.emulated(90, num_sms=3):
        yield request.param
