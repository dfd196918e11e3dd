"""Tests flash-attn's private forward and backward functions, alone and as a ring uses them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.integrations.flash_attn import flash_attn_interface as interface
from flash_formulas import flash_attention, offsets, packed_flash_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS_Q, LENGTHS_K = [3, 1, 5], [6, 4, 2]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

# Most options of the private functions have no default, and do not accept None.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.5, "causal": True},
    "ALiBi": {"alibi_slopes": SLOPES},
    "causal ALiBi": {"alibi_slopes": SLOPES, "causal": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def as_private(
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "softmax_scale": DIM**-0.5,
        "causal": causal,
        "window_size_left": window_size[0],
        "window_size_right": window_size[1],
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def gradients_of(out: Tensor, inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@each_option
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 7), (7, 5)])
def test_dense_pair(options: dict[str, Any], num_queries: int, num_keys: int) -> None:
    q, dout = (random(2, num_queries, HEADS, DIM, seed=seed) for seed in (0, 3))
    k, v = (random(2, num_keys, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    inputs = leaves(q, k, v)
    wanted_out, wanted_lse = flash_attention(*inputs, **options)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(*inputs, **as_private(**options), return_softmax=False)
    assert not out.requires_grad
    torch.testing.assert_close((out, lse), (wanted_out.detach(), wanted_lse.detach()))
    assert s_dmask.numel() == 0
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    dq, dk, dv = (torch.full_like(tensor, math.nan) for tensor in (q, k, v))
    softmax_d = interface._flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, **as_private(**options), deterministic=False, rng_state=rng_state
    )
    torch.testing.assert_close((dq, dk, dv), gradients_of(wanted_out, inputs, dout))
    assert softmax_d.shape == (2, HEADS, 128)
    torch.testing.assert_close(softmax_d[:, :, :num_queries], (dout * out).sum(-1).transpose(1, 2).float())


@each_option
def test_varlen_pair(options: dict[str, Any]) -> None:
    q, dout = (random(sum(LENGTHS_Q), HEADS, DIM, seed=seed) for seed in (0, 3))
    k, v = (random(sum(LENGTHS_K), KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    inputs = leaves(q, k, v)
    packed = (offsets(LENGTHS_Q), offsets(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K))
    wanted_out, wanted_lse = packed_flash_attention(*inputs, LENGTHS_Q, LENGTHS_K, **options)
    out, lse, _, rng_state = interface._flash_attn_varlen_forward(q, k, v, *packed, **as_private(**options))
    torch.testing.assert_close((out, lse), (wanted_out.detach(), wanted_lse.detach()))
    dq, dk, dv = (torch.full_like(tensor, math.nan) for tensor in (q, k, v))
    softmax_d = interface._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, dq, dk, dv, *packed, **as_private(**options), deterministic=True, rng_state=rng_state
    )
    torch.testing.assert_close((dq, dk, dv), gradients_of(wanted_out, inputs, dout))
    assert softmax_d.shape == (HEADS, sum(LENGTHS_Q) + 128 * 3)
    begin = 0
    for sequence, rows in enumerate((dout * out).sum(-1).float().split(LENGTHS_Q)):
        place = begin + 128 * sequence
        torch.testing.assert_close(softmax_d[:, place : place + len(rows)], rows.transpose(0, 1))
        begin += len(rows)


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    q = random(2, 5, HEADS, DIM)
    options = as_private(dropout_p=0.4)
    inputs = leaves(q, q, q)
    out, lse, _, rng_state = interface._flash_attn_forward(*inputs, **options, return_softmax=False)
    again = fastattn.attention(
        *(tensor.transpose(1, 2) for tensor in inputs), dropout_p=0.4, dropout_seed=rng_state[:1]
    ).transpose(1, 2)
    torch.testing.assert_close(out, again.detach())
    grads = tuple(torch.empty_like(tensor) for tensor in inputs)
    arguments = (q, *inputs, out, lse, *grads)
    interface._flash_attn_backward(*arguments, **options, deterministic=False, rng_state=rng_state)
    torch.testing.assert_close(grads, gradients_of(again, inputs, q))
    with pytest.raises(fastattn.InputError, match=r"^rng_state: expected what the forward pass returned"):
        interface._flash_attn_backward(*arguments, **options, deterministic=False)


def test_gradients_that_are_not_wanted_may_be_none() -> None:
    q, dv = random(1, 3, HEADS, DIM), torch.empty(1, 3, HEADS, DIM, dtype=torch.float64)
    out, lse, *_ = interface._flash_attn_forward(q, q, q, **as_private(), return_softmax=False)
    interface._flash_attn_backward(q, q, q, q, out, lse, None, None, dv, **as_private(), deterministic=False)
    inputs = leaves(q, q, q)
    torch.testing.assert_close(dv, gradients_of(flash_attention(*inputs)[0], inputs, q)[2])


def merge(blocks: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges blocks of one softmax as ring-flash-attention does, where the lse of an empty row is +inf, too."""
    lses = torch.stack([lse.masked_fill(lse == math.inf, -math.inf) for _, lse in blocks])
    whole = lses.logsumexp(0)
    weights = (lses - whole).exp().nan_to_num(0.0)
    out = sum(out * weight.transpose(1, 2)[..., None] for (out, _), weight in zip(blocks, weights, strict=True))
    return out, whole


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 1.5}, {"alibi_slopes": None, "window_size": (-1, -1)}],
    ids=["plain", "softcap", "by default"],
)
def test_a_ring_of_two_halves(options: dict[str, Any]) -> None:
    """These are the second half of the queries: they see the first half of the keys fully, and the second causally."""
    q, dout = (random(2, 4, HEADS, DIM, seed=seed) for seed in (0, 3))
    k, v = (random(2, 8, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    blocks = [(k[:, :4], v[:, :4], False), (k[:, 4:], v[:, 4:], True)]
    parts = [
        interface._flash_attn_forward(q, key, value, **as_private(causal, **options), return_softmax=False)[:2]
        for key, value, causal in blocks
    ]
    out, lse = merge(parts)
    inputs = leaves(q, k, v)
    wanted, wanted_lse = flash_attention(*inputs, causal=True, **options)
    torch.testing.assert_close((out, lse), (wanted.detach(), wanted_lse.detach()))
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for number, (key, value, causal) in enumerate(blocks):
        of_block = torch.empty_like(q)
        grads = of_block, dk[:, 4 * number : 4 * number + 4], dv[:, 4 * number : 4 * number + 4]
        interface._flash_attn_backward(
            *(dout, q, key, value, out, lse, *grads), **as_private(causal, **options), deterministic=False
        )
        dq += of_block
    torch.testing.assert_close((dq, dk, dv), gradients_of(wanted, inputs, dout))


def test_a_ring_of_packed_sequences() -> None:
    """Every sequence has its keys in two halves. The last sequence has no keys in the second half."""
    q, dout = (random(sum(LENGTHS_Q), HEADS, DIM, seed=seed) for seed in (0, 3))
    halves = [[4, 1, 2], [2, 3, 0]]
    keys, values = (
        [random(sum(half), KV_HEADS, DIM, seed=seed + n) for n, half in enumerate(halves)] for seed in (5, 7)
    )
    inputs = leaves(q, *keys, *values)

    def whole(first: Tensor, second: Tensor) -> Tensor:
        pieces = zip(first.split(halves[0]), second.split(halves[1]), strict=True)
        return torch.cat([torch.cat(pair) for pair in pieces])

    wanted, _ = packed_flash_attention(
        inputs[0], whole(*inputs[1:3]), whole(*inputs[3:5]), LENGTHS_Q, LENGTHS_K[:1] + [4, 2]
    )
    options = as_private()
    results = []
    for key, value, half in zip(keys, values, halves, strict=True):
        packed = (offsets(LENGTHS_Q), offsets(half), 5, max(half))
        out, lse, *_ = interface._flash_attn_varlen_forward(q, key, value, *packed, **options)
        results.append((out[None], lse[None], packed))
    out, lse = merge([result[:2] for result in results])
    torch.testing.assert_close(out[0], wanted.detach())
    grads = [torch.zeros_like(tensor) for tensor in inputs]
    for number, (_, _, packed) in enumerate(results):
        dq = torch.empty_like(q)
        own_grads = dq, grads[1 + number], grads[3 + number]
        tensors = dout, q, keys[number], values[number], out[0], lse[0], *own_grads
        interface._flash_attn_varlen_backward(*tensors, *packed, **options, deterministic=False)
        grads[0] += dq
    torch.testing.assert_close(tuple(grads), gradients_of(wanted, inputs, dout))


def test_signatures_are_flash_attns() -> None:
    options = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    varlen_options = "dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 "
    both_offsets = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    gradients = "dout q k v out softmax_lse dq dk dv "
    wanted = {
        "_flash_attn_forward": "q k v " + options + "return_softmax",
        "_flash_attn_backward": gradients + options + "deterministic rng_state=None",
        "_flash_attn_varlen_forward": f"q k v {both_offsets}{varlen_options}alibi_slopes=None return_softmax=False "
        "block_table=None leftpad_k=None seqused_k=None zero_tensors=False",
        "_flash_attn_varlen_backward": gradients + both_offsets + options + "deterministic rng_state=None "
        "zero_tensors=False",
    }
    for name, signature in wanted.items():
        function = getattr(interface, name)
        assert getattr(interface, f"_wrapped{name}") is function
        parameters = inspect.signature(function).parameters.values()
        came = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert " ".join(came) == signature, name


def test_leftpad_is_refused_by_name() -> None:
    q, starts = random(3, HEADS, DIM), offsets([3])
    with pytest.raises(fastattn.InputError, match=r"^leftpad_k: expected None"):
        interface._flash_attn_varlen_forward(q, q, q, starts, starts, 3, 3, 0.0, 1.0, False, leftpad_k=starts)
