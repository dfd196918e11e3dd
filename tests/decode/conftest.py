"""What the tests of flash-decoding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["torch", "triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """In force, with the emulator's checks."""
    import fastattn  # not before it is decided which library the process takes
    from cuda_kernels import HAS_KERNELS, NO_KERNELS, checked

    if request.param == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    with fastattn.use_backend(request.param), checked():
        yield request.param
