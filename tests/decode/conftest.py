"""What the tests of flash-decoding share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@pytest.fixture(params=["torch", "triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """In force, with the emulator's checks. A test may add "cuda on sm_90" to the parameters."""
    import fastattn  # not before it is decided which library the process takes
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
