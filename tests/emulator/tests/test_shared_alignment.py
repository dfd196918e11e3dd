"""Tests that shared memory begins after the system's bytes, with no more alignment than the kernel declares."""

from __future__ import annotations

import pytest
import torch

from cuda_sources import load, needs_nvcc
from emulator import Module, TensorMap
from expected_errors import failing

pytestmark = needs_nvcc
each_seed = pytest.mark.parametrize("seed", range(4))


def copies(kernel: str, seed: int) -> bool:
    """Returns True if the kernel reads the box correctly."""
    values = torch.arange(8 * 64).half().view(8, 64)
    out = torch.zeros(8, 64, dtype=torch.half)
    tensor_map = TensorMap(values, (8, 64), "128B")
    load("shared_alignment", "compute_90a").launch(
        kernel, (1,), (64,), [tensor_map, out], shared_bytes=2048, seed=seed, uninitialised=True
    )
    return torch.equal(out, values)


@each_seed
def test_a_swizzle_needs_its_alignment(seed: int) -> None:
    with failing("misaligned", "no multiple of 128"):
        copies("copies_at_16", seed)
    assert not copies("copies_at_128", seed)
    assert not copies("copies_at_512", seed)
    assert copies("copies_at_1024", seed)
    assert copies("copies_rounded_up", seed)


def test_addresses_and_sizes() -> None:
    module, out = load("shared_alignment", "compute_90a"), torch.zeros(5, dtype=torch.int32)
    module.launch("looks", (1,), (1,), [out, -1], shared_bytes=96)
    fixed, dynamic, dynamic_size, total_size = out[:4].tolist()
    assert fixed >= 1024 and fixed % 64 == 32 and dynamic >= fixed + 48 and dynamic % 128 == 64
    assert (dynamic_size, total_size) == (96, 64 + 96)
    for address in (0, 1023, dynamic + 96):
        with failing("out-of-bounds"):
            module.launch("looks", (1,), (1,), [out, address], shared_bytes=96)
    Module(module.ptx, is_tritons=True).launch("looks", (1,), (1,), [out, -1], shared_bytes=96)
    assert out[:2].tolist() == [1024, 1024 + 64]
