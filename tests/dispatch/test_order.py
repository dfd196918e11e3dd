"""Tests which backend is first where several have a kernel for a call, and what ``explain`` says about it."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.dispatch import choose as dispatch
from fastattn.dispatch.device import DeviceFacts
from fastattn.dispatch.request import Request
from fastattn.dispatch.support import KERNEL_BACKENDS
from fastattn.ops.describe import ATTENTION, AttentionDetails

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]

GPU = torch.device("cuda", 0)


def attention(head_dim: int, *features: str, value_dim: int | None = None) -> Request:
    value_dim = head_dim if value_dim is None else value_dim
    sizes = AttentionDetails(1, 8, 8, 512, 512)
    return Request(ATTENTION, GPU, torch.bfloat16, frozenset(features), head_dim, value_dim, sizes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts(arch=90, num_sms=132, shared_memory_bytes=227 * 1024, driver_cuda=13000)
    monkeypatch.setattr(dispatch, "facts", lambda device: facts if device.type == "cuda" else None)
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80", "90a"])
    monkeypatch.setitem(dispatch.native.BUILD, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "_choices", {})


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("features", [(), ("causal", "gqa"), ("window", "sinks", "varlen"), ("gradients",)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_kernel_for_hopper_runs(dims: tuple[int, int], features: tuple[str, ...]) -> None:
    choice = dispatch.choose(attention(dims[0], *features, value_dim=dims[1]))
    assert choice.backend == "cuda" and "_sm90<" in choice.kernel


@pytest.mark.parametrize("features", [(), ("gradients",)], ids=str)
def test_a_library_without_kernels_for_hopper_still_comes_first(
    features: tuple[str, ...], hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80"])
    for head_dim in (64, 128, 256):
        assert dispatch.choose(attention(head_dim, *features)).backend == "cuda"


@pytest.mark.usefixtures("hopper")
def test_the_reason_says_that_nothing_is_measured() -> None:
    rejected = dispatch.choose(attention(64)).rejected
    assert rejected["triton"].startswith("cuda comes first (no measurement says that triton is faster)")
    assert 'use_backend("triton") selects it' in rejected["triton"]


@pytest.mark.usefixtures("hopper")
def test_a_forced_backend_runs_whatever_the_order() -> None:
    for backend in KERNEL_BACKENDS:
        with fastattn.use_backend(backend):
            assert dispatch.choose(attention(64, "gradients")).backend == backend
