"""What the tests of the attention kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def hopper(emulated_gpu: None) -> Iterator[None]:
    """A Hopper GPU with three SMs, so that CTAs take several tiles each. Where threads have read, TMA may write over it
    behind a proxy fence alone.
    """
    from cuda_kernels import EMULATED  # not before it is decided which library the process takes

    if not EMULATED:
        yield
        return
    from emulator import device, options

    with device.emulated(90, num_sms=3), options.launching(strict_proxy_reads=True):
        yield
