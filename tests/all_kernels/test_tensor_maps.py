"""Checks the strides of the tensor maps that Hopper kernels are launched with. No document says that maps support every
stride of PyTorch's views, so the strides must not make rows overlap, and must not be 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import EMULATED, MARKS, NEEDS_HOPPER, checked, only_emulated
from int8_cases import normal, quantised
from int8_kernels import FORWARD, running_sm90

if EMULATED:
    from emulator import device, launches
    from emulator.native import native

pytestmark = [*MARKS, NEEDS_HOPPER, only_emulated]


def view(layout: str, heads: int) -> Tensor:
    """Returns a tensor [2, heads, 70, 64] in a memory layout."""
    if layout == "heads before rows":
        return torch.randn(2, heads, 70, 64).half()
    if layout == "rows before heads":
        return torch.randn(2, 70, heads, 64).half().transpose(1, 2)
    if layout == "of one projection":
        return torch.randn(2, 70, 3, heads, 64).half()[:, :, 1].transpose(1, 2)
    return torch.randn(1, 1, 70, 64).half().expand(2, heads, 70, 64)


@pytest.mark.parametrize("layout", ["heads before rows", "rows before heads", "of one projection", "expanded"])
def test_maps_of_attention(layout: str) -> None:
    query, key, value = (view(layout, heads).requires_grad_() for heads in (4, 2, 2))
    native.runtime.take_warnings()
    with device.emulated(90), checked(), launches.recorded() as found:
        fastattn.attention(query, key, value).float().sum().backward()
    assert sum("sm90" in launched.report.kernel for launched in found) >= 2
    assert not [text for text in native.runtime.take_warnings() if "of dimension 0" in text]


def test_maps_of_matrices() -> None:
    x, (weight, scale) = normal(300, 512, seed=1), quantised(256, 512, "channel")
    native.runtime.take_warnings()
    with running_sm90(FORWARD, 128):
        torch.ops.fastattn.int8_matmul(x, weight, scale, None, None, "none", False)
    assert not native.runtime.take_warnings()
