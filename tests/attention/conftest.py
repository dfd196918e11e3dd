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
