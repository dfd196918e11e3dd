"""Holds inputs and checks for the tests of torch's flash attention operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_formulas import offsets
from kernel_device import DEVICE

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS_Q, LENGTHS_K = [3, 9, 5], [6, 4, 12]
NEAR = {"rtol": 1e-2, "atol": 1e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draws values that float16 represents exactly, so that both sides get the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def check_near(came: Any, wanted: Any) -> None:
    for ours, theirs in zip(came, wanted, strict=True):
        torch.testing.assert_close(ours.detach().double().cpu(), theirs.detach().double(), **NEAR)


def check_kernels(calls: list[Any]) -> None:
    """Checks the calls of forward and backward. A GPU's backward runs in a thread where no backend is forced."""
    assert [call.op for call in calls] == ["attention", "attention backward"]
    assert calls[0].backend == "cuda" and calls[1].backend in (("cuda",) if DEVICE == "cpu" else ("cuda", "triton"))


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Swaps dimensions: ``[B, H, S, D]`` becomes ``[B, S, H, D]``, or back."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def packed_sizes() -> tuple[Any, ...]:
    return offsets(LENGTHS_Q).to(DEVICE), offsets(LENGTHS_K).to(DEVICE), max(LENGTHS_Q), max(LENGTHS_K)


def packed_tensors() -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return random(total_q, HEADS, DIM), random(total_k, KV_HEADS, DIM, seed=1), random(total_k, KV_HEADS, DIM, seed=2)
