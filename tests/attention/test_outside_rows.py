"""Tests the rows of packed results that lie outside of all sequences: zero, with an lse of -inf, whatever the memory
held before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import EMULATED, MARKS, checked
from fastattn import reference
from kernel_device import DEVICE

if EMULATED:
    from emulator import device

pytestmark = MARKS

SEED = 5


@pytest.fixture(params=(80, 90) if EMULATED else (None,), ids=str)
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs on a GPU of each architecture. New memory is NaN, as ``torch.use_deterministic_algorithms`` fills it."""
    torch.use_deterministic_algorithms(True)
    try:
        if request.param is None:
            yield
        else:
            with device.emulated(request.param, num_sms=3), checked():
                yield
    finally:
        torch.use_deterministic_algorithms(False)


def offsets(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def draw(rows: int, heads: int, seed: int, head_dim: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randn(rows, heads, head_dim, generator=generator).to(DEVICE, torch.float16).requires_grad_()


CALLS: dict[str, tuple[int, dict[str, Any]]] = {  # head dim, options
    "plain": (64, {}),
    "options": (64, {"softcap": 9.0}),
    "wide": (192, {}),
    "deterministic": (64, {"deterministic": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_they_are_zero(name: str, gpu: None) -> None:
    """Rows before, between and behind sequences, and behind max_seqlen. The first sequence has no keys, the second no
    queries."""
    head_dim, options = CALLS[name]
    query, key, value = (
        draw(rows, heads, i, head_dim) for i, (rows, heads) in enumerate(((90, 4), (110, 2), (110, 2)))
    )
    with fastattn.use_backend("cuda"):
        out, lse = fastattn.attention_varlen(
            query, key, value, offsets(3, 10, 10, 75), offsets(5, 5, 25, 100), 60, 80, return_lse=True, **options
        )
        grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    inside, keys = slice(10, 70), slice(25, 100)
    wide = [
        t.detach()[rows].transpose(0, 1)[None].double() for t, rows in ((query, inside), (key, keys), (value, keys))
    ]
    wide = [t.cpu().requires_grad_() for t in wide]
    exact, exact_lse, *_ = reference.attention(*wide, softcap=options.get("softcap", 0.0))
    exact_grads = torch.autograd.grad(exact.square().sum(), wide)
    for found, expected, rows in zip((out, *grads), (exact, *exact_grads), (inside, inside, keys, keys), strict=True):
        torch.testing.assert_close(found[rows].transpose(0, 1)[None].cpu().double(), expected, rtol=1e-2, atol=1e-2)
        outside = torch.ones(found.shape[0], dtype=torch.bool)
        outside[rows] = False
        assert not found[outside].any()
    torch.testing.assert_close(lse[:, inside].cpu().double(), exact_lse[0], rtol=1e-3, atol=1e-3)
    assert bool((lse[:, :10] == -torch.inf).all() and (lse[:, 70:] == -torch.inf).all())


@pytest.mark.parametrize("count", [130, 0, 1])  # a CTA looks for 128 gaps at a time
def test_any_number_of_sequences(count: int, gpu: None) -> None:
    """Each sequence has one row, and a row follows it that belongs to none."""
    query = draw(2 * count + 7, 2, 3)
    rows = offsets(*(2 * i for i in range(count + 1)))
    with fastattn.use_backend("cuda"):
        out, lse = fastattn.attention_varlen(query, query, query, rows, rows, 1, 1, return_lse=True)
        grads = torch.autograd.grad(out.float().sum(), query)
    belongs = torch.zeros(query.shape[0], dtype=torch.bool)
    belongs[: 2 * count : 2] = True
    assert torch.equal(out[belongs], query[belongs].detach()) and not out[~belongs].any()
    assert torch.equal(lse.isfinite().all(0).cpu(), belongs) and not grads[0][~belongs].any()


def test_rows_over_pages(gpu: None) -> None:
    """The second sequence has more keys than one CTA takes, the third has none."""
    query, pages = draw(40, 2, 4), draw(70 * 16, 2, 5).detach().view(70, 16, 2, 64).transpose(1, 2)
    table = torch.arange(210, dtype=torch.int32, device=DEVICE).view(3, 70) % 70
    with fastattn.use_backend("cuda"), torch.no_grad():
        out, lse = fastattn.attention_varlen(
            query,
            pages,
            pages,
            offsets(2, 5, 21, 30),
            offsets(0, 9, 1009, 1009),
            16,
            1000,
            block_table=table,
            return_lse=True,
        )
    assert bool(out[2:21].isfinite().all() and lse[:, 2:21].isfinite().all())
    assert not out[:2].any() and not out[21:].any() and bool((lse[:, 21:] == -torch.inf).all())
