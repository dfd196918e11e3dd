"""What the tests of the attention kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def hopper(emulated_gpu: None) -> Iterator[None]:
    """A Hopper GPU with three SMs, so that CTAs take several tiles each."""
    from cuda_kernels import EMULATED  # not before it is decided which library the process takes

    if not EMULATED:
        yield
        return
    from emulator import device

    with device.emulated(90, num_sms=3):
        yield
