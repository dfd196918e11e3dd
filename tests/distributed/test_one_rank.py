"""Tests attention spread over a group of one rank: the backend of its backward pass, and a group's first call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from cuda_kernels import MARKS
from fastattn.distributed import context_parallel_attention, ring
from kernel_device import DEVICE, IS_STAND_IN

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Makes the group as ``init_process_group()`` does, with a backend for each type of device."""
    backend = "gloo" if IS_STAND_IN else None  # NCCL has no stand-in that works
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients_in_another_thread(out: Tensor, inputs: list[Tensor]) -> None:
    """Computes gradients in another thread, as a GPU's autograd does."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            torch.autograd.grad(out.float().sum(), inputs, retain_graph=True)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("backend", ["cuda", "triton", "torch", "sdpa_kernel"])
def test_the_backward_pass_uses_what_forward_chose(backend: str, strategy: str) -> None:
    inputs = [torch.randn(1, 2, 8, 32, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    asked: contextlib.AbstractContextManager[Any]
    asked = sdpa_kernel(SDPBackend.MATH) if backend == "sdpa_kernel" else fastattn.use_backend(backend)
    with asked, fastattn.record() as forward:
        out = context_parallel_attention(*inputs, strategy=strategy)
    chosen = "torch" if backend == "sdpa_kernel" else backend
    assert {call.backend for call in forward if call.op == "attention"} == {chosen}
    with fastattn.record() as backward, fastattn.use_backend("triton" if backend == "cuda" else "cuda"):
        gradients_in_another_thread(out, inputs)
        torch.autograd.grad(out.float().sum(), inputs, retain_graph=True)
    assert {call.backend for call in backward} == ({chosen} if chosen != "torch" else set())


def test_all_ranks_take_part_in_a_groups_first_call_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL needs this. An earlier call with CPU tensors in the same group does not count, and needs nothing."""
    called = []
    monkeypatch.setattr(ring.dist, "all_reduce", lambda tensor, group: called.append((tensor.device.type, group)))
    group = dist.group.WORLD
    for device in ("cpu", "meta", "meta"):
        tensor = torch.zeros(1, 1, 4, 8, device=device)
        with fastattn.use_backend("torch"):
            context_parallel_attention(tensor, tensor, tensor, group=group, strategy="ring")
    assert called == [("meta", group)]
