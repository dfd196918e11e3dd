"""Tests that the warning of a detour through PyTorch points at the user's line, whatever lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastattn
from fastattn.dispatch import choose as dispatch
from kernel_device import DEVICE

pytestmark = pytest.mark.usefixtures("emulated_gpu")

with torch.device(DEVICE):
    X = torch.zeros(1, 2, 4, 16)  # no kernel takes float32
    ROWS = torch.zeros(4, 2, 16)
    OFFSETS = torch.tensor([0, 4], dtype=torch.int32)
    LAYER = fastattn.nn.Int8Linear.from_linear(torch.nn.Linear(16, 16))
    CACHE = fastattn.KVCache(1, 1, 2, 16, capacity=8, dtype=torch.float32, device=DEVICE)
    HEADS = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    BATCH = torch.zeros(1, 4, 16)

CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: fastattn.attention(X, X, X, causal=True),
    "attention_varlen": lambda: fastattn.attention_varlen(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 4, 4),
    "scaled_dot_product_attention": lambda: fastattn.scaled_dot_product_attention(X, X, X),
    "attention_with_kv_cache": lambda: fastattn.attention_with_kv_cache(X, X, X, OFFSETS[1:]),
    "a cache": lambda: CACHE.attend(0, X, X, X),
    "a layer": lambda: LAYER(X),
    "a layer in another": lambda: torch.nn.Sequential(torch.nn.Identity(), LAYER)(X),
    "int8_linear": lambda: fastattn.int8_linear(X, fastattn.quantize_int8(torch.ones(16, 16, device=DEVICE))),
    "the patch": lambda: F.scaled_dot_product_attention(X, X, X),
    "a layer of PyTorch's": lambda: HEADS(BATCH, BATCH, BATCH, need_weights=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_detours_warn_at_the_users_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    with fastattn.patch_sdpa(), torch.no_grad(), pytest.warns(RuntimeWarning, match="fastattn runs this") as warned:
        CALLS[name]()
    ours = [warning for warning in warned if "fastattn runs this" in str(warning.message)]
    assert len(ours) == 1
    assert (ours[0].filename, ours[0].lineno) == (__file__, CALLS[name].__code__.co_firstlineno)
