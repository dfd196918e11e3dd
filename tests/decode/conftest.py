"""Holds the fixtures of flash-decoding's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@pytest.fixture(params=["torch", "triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one backend and turns the emulator's checks on. A test may add "cuda on sm_90" to the parameters."""
    import fastattn  # imports fastattn, so not before ../conftest.py has chosen its library
    from cuda_kernels import EMULATED, HAS_KERNELS, NO_KERNELS, checked

    name, _, on_hopper = request.param.partition(" on ")
    if name == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    if on_hopper and not EMULATED:
        pytest.skip("a GPU is what it is")
    with contextlib.ExitStack() as stack:
        if on_hopper:
            from emulator import device

            stack.enter_context(device.emulated(90, num_sms=4))
        stack.enter_context(fastattn.use_backend(name))
        stack.enter_context(checked())
        yield name
