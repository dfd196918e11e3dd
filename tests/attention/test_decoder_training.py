"""The demo's decoder trains a few steps through the CUDA C++ kernels of each architecture, forward and backward, and
reaches the losses of plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch

import fastattn
from cuda_kernels import EMULATED, IS_HOPPER, MARKS, checked
from fastattn import native
from kernel_device import DEVICE

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from decoder import Decoder, DecoderConfig, PackedAttention

if EMULATED:
    from emulator import device

pytestmark = MARKS

LENGTHS = (50, 71, 20)
STEPS = 3


def losses(model: Decoder, backend: str) -> list[float]:
    """Returns the loss of each step of training on one batch of packed documents."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(64, (sum(LENGTHS),), generator=generator).to(DEVICE)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(DEVICE)
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=DEVICE)
    attend = PackedAttention(ends, max(LENGTHS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    with fastattn.use_backend(backend):
        for _ in range(STEPS):
            logits = model(tokens, positions, attend).float()
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("arch", [80, 90])
def test_the_decoder_trains_through_the_kernels(arch: int) -> None:
    if arch == 90 and (not IS_HOPPER or "90a" not in native.BUILD["archs"]):
        pytest.skip("needs kernels for sm_90a")
    torch.manual_seed(3)
    config = DecoderConfig(64, dim=128, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_positions=128)
    model = Decoder(config).to(DEVICE, torch.bfloat16)
    expected = losses(copy.deepcopy(model), "torch")
    with device.emulated(arch) if EMULATED else checked(), checked(), fastattn.record() as calls:
        found = losses(model, "cuda")
    assert found == pytest.approx(expected, rel=0.01) and found[-1] < found[0] - 0.1
    kernels = " ".join(kernel for _, _, kernel in calls)
    if EMULATED:
        others = {80: "_sm90", 90: "key_value_sm80"}[arch]
        assert f"_sm{arch}<64" in kernels and others not in kernels
    assert len(calls) == 2 * config.num_layers * STEPS  # forward and backward
