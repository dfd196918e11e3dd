"""Tests flash-attn's functions on the CUDA C++ kernels: they match PyTorch in float64, and take no detour."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastattn
import fastattn.integrations.flash_attn as flash_attn
from cuda_kernels import MARKS, checked
from fastattn.integrations.flash_attn import flash_attn_interface as interface
from flash_formulas import flash_attention, offsets, packed_flash_attention, rotated, scores_of
from kernel_device import DEVICE
from torch_flash_cases import DIM, HEADS, KV_HEADS, NEAR, check_near, exact, random

pytestmark = [*MARKS, pytest.mark.filterwarnings("error:fastattn runs this call in PyTorch")]


@pytest.fixture(autouse=True)
def cuda_kernels_alone() -> Iterator[None]:
    with fastattn.use_backend("cuda"):
        yield


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}, {"softcap": 1.5}],
    ids=["causal", "causal ALiBi", "softcap"],
)
def test_private_pair(options: dict[str, Any]) -> None:
    q, dout = random(1, 20, HEADS, DIM), random(1, 20, HEADS, DIM, seed=3)
    k, v = random(1, 12, KV_HEADS, DIM, seed=1), random(1, 12, KV_HEADS, DIM, seed=2)
    inputs = exact(q, k, v)
    wanted, wanted_lse = flash_attention(*inputs, **options)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": options["alibi_slopes"].clone().to(DEVICE)}  # tracked memory
    usual = {"dropout_p": 0.0, "softmax_scale": DIM**-0.5, "causal": False, "softcap": 0.0, "alibi_slopes": None}
    arguments = {**usual, "window_size_left": -1, "window_size_right": -1, **options}
    with checked(), fastattn.record() as calls:
        out, lse, *_ = interface._flash_attn_forward(q, k, v, **arguments, return_softmax=False)
        grads = tuple(torch.full_like(tensor, math.nan) for tensor in (q, k, v))
        interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, **arguments, deterministic=False)
    assert [(call.op, call.backend) for call in calls] == [("attention", "cuda"), ("attention backward", "cuda")]
    check_near((out, lse), (wanted, wanted_lse))
    check_near(grads, torch.autograd.grad(wanted, inputs, dout.double().cpu()))


def test_half_a_ring() -> None:
    """A block's gradients follow from the output and lse over all keys."""
    q, dout = random(1, 8, HEADS, DIM), random(1, 8, HEADS, DIM, seed=3)
    k, v = random(1, 16, KV_HEADS, DIM, seed=1), random(1, 16, KV_HEADS, DIM, seed=2)
    inputs = exact(q, k, v)
    wanted, lse = flash_attention(*inputs)
    wanted_grads = torch.autograd.grad(wanted, inputs, dout.double().cpu())
    out, lse = wanted.detach().half().to(DEVICE), lse.detach().float().to(DEVICE)
    grads = tuple(torch.empty_like(tensor) for tensor in (q, k[:, :8], v[:, :8]))
    dq = torch.zeros(q.shape, dtype=torch.float64)
    for rows in (slice(0, 8), slice(8, 16)):
        tensors = dout, q, k[:, rows], v[:, rows], out, lse
        interface._flash_attn_backward(*tensors, *grads, 0.0, DIM**-0.5, False, -1, -1, 0.0, None, True)
        dq += grads[0].double().cpu()
        check_near(grads[1:], (wanted_grads[1][:, rows], wanted_grads[2][:, rows]))
    torch.testing.assert_close(dq, wanted_grads[0], **NEAR)


def test_varlen_pair() -> None:
    lengths_q, lengths_k = [3, 9, 5], [6, 4, 12]
    q, dout = random(17, HEADS, DIM), random(17, HEADS, DIM, seed=3)
    k, v = random(22, KV_HEADS, DIM, seed=1), random(22, KV_HEADS, DIM, seed=2)
    inputs = exact(q, k, v)
    wanted, wanted_lse = packed_flash_attention(*inputs, lengths_q, lengths_k, causal=True)
    arguments = (offsets(lengths_q).to(DEVICE), offsets(lengths_k).to(DEVICE), 9, 12, 0.0, DIM**-0.5, True, -1, -1, 0.0)
    grads = tuple(torch.full_like(tensor, math.nan) for tensor in (q, k, v))
    with checked(), fastattn.record() as calls:
        out, lse, *_ = interface._flash_attn_varlen_forward(q, k, v, *arguments)
        interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *arguments, None, False)
    assert {call.backend for call in calls} == {"cuda"}
    check_near((out, lse), (wanted, wanted_lse))
    check_near(grads, torch.autograd.grad(wanted, inputs, dout.double().cpu()))


def test_s_dmask_says_what_the_kernel_dropped() -> None:
    """This holds also where rows of a sequence are not used."""
    lengths_q, lengths_k, used_q = [3, 9, 5], [6, 4, 12], [3, 0, 1]
    q, k, v = random(17, HEADS, DIM), random(22, KV_HEADS, DIM, seed=1), random(22, KV_HEADS, DIM, seed=2)
    packed = (offsets(lengths_q).to(DEVICE), offsets(lengths_k).to(DEVICE), 9, 12)
    used = torch.tensor(used_q, dtype=torch.int32, device=DEVICE)
    with checked(), fastattn.record() as calls:
        out, _, s_dmask = flash_attn.flash_attn_varlen_func(
            q, k, v, *packed, 0.4, return_attn_probs=True, seqused_q=used
        )
    assert {call.backend for call in calls} == {"cuda"}
    query, key, value, signs = (tensor.detach().double().cpu() for tensor in (q, k, v, s_dmask))
    rows = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), used_q, strict=True)
    wanted = [torch.zeros(length, HEADS, DIM, dtype=torch.float64) for length in lengths_q]
    for sequence, (own_q, own_k, own_v, num_used) in enumerate(rows):
        weights = scores_of(own_q[None, :num_used], own_k[None]).softmax(-1)[0] / 0.6
        kept = weights.masked_fill(signs[sequence, :, :num_used, : len(own_k)] < 0, 0.0)
        wanted[sequence][:num_used] = torch.einsum("hqk,khd->qhd", kept, own_v.repeat_interleave(2, dim=1))
    check_near((out,), (torch.cat(wanted),))


@pytest.mark.parametrize("leftpad", [False, True], ids=["contiguous", "leftpad"])
def test_with_kvcache(leftpad: bool) -> None:
    lengths, starts = [5, 9], [2, 3] if leftpad else [0, 0]
    plain_q, plain_new = random(2, 1, HEADS, DIM), random(2, 1, KV_HEADS, DIM, seed=3)
    angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    cos, sin = angles.cos().half().to(DEVICE), angles.sin().half().to(DEVICE)
    places = torch.tensor(lengths, device=DEVICE)[:, None]
    q, new = (rotated(x.float(), cos.float(), sin.float(), places, True).half() for x in (plain_q, plain_new))
    k_cache, v_cache = random(2, 16, KV_HEADS, DIM, seed=1), random(2, 16, KV_HEADS, DIM, seed=2)
    wanted = []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        query, key, value = exact(
            q[row : row + 1],
            torch.cat([k_cache[row, start:length], new[row]])[None],
            torch.cat([v_cache[row, start:length], plain_new[row]])[None],
        )
        wanted.append(flash_attention(query, key, value)[0])
    with checked(), fastattn.record() as calls:
        out = flash_attn.flash_attn_with_kvcache(
            *(plain_q, k_cache, v_cache, plain_new, plain_new, cos, sin),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            cache_leftpad=torch.tensor(starts, dtype=torch.int32, device=DEVICE) if leftpad else None,
        )
    assert [(call.op, call.backend) for call in calls] == [("decode", "cuda")]
    check_near((out,), (torch.cat(wanted),))
    check_near((k_cache[0, 5],), (new[0, 0].double().cpu(),))


def test_head_dims_that_are_padded() -> None:
    q, dout = random(1, 5, HEADS, 20), random(1, 5, HEADS, 20, seed=3)
    inputs = exact(q, q, q)
    wanted, _ = flash_attention(*inputs, causal=True)
    arguments = (0.0, 20**-0.5, True, -1, -1, 0.0, None)
    out, lse, *_ = interface._flash_attn_forward(q, q, q, *arguments, False)
    grads = tuple(torch.empty_like(q) for _ in range(3))
    with fastattn.record() as calls:
        interface._flash_attn_backward(dout, q, q, q, out, lse, *grads, *arguments, False)
    assert {call.backend for call in calls} == {"cuda"}
    check_near(grads, torch.autograd.grad(wanted, inputs, dout.double().cpu()))
