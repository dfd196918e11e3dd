"""Tests StepCache: a model computes the same over a KVCache as over the steps and chunks of a PagedKVCache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from by_hand import normal
from fastattn import InputError
from fastattn.cache.contiguous import KVCache
from fastattn.cache.paged import PagedKVCache
from fastattn.cache.protocol import AttendOptions, StepCache

LAYERS, BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM, POSITIONS = 2, 3, 4, 2, 16, 8, 16


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


ANGLES = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -1, DIM // 4)
OPTIONS: AttendOptions = {
    "rotary_cos": ANGLES.cos().double(),
    "rotary_sin": ANGLES.sin().double(),
    "rotary_interleaved": True,
    "window": (5, 0),
    "softcap": 3.0,
    "sinks": normal(3, HEADS),
    "alibi_slopes": normal(4, HEADS).abs(),
    "scale": 0.3,
    "batch_invariant": True,
}


def contiguous(**changes: Any) -> Callable[[int], StepCache]:
    cache = KVCache(LAYERS, BATCH, KV_HEADS, DIM, value_dim=VALUE_DIM, **{"dtype": torch.float64, **changes})
    return lambda num_new: cache


def in_pages(form: str, **changes: Any) -> Callable[[int], StepCache]:
    options = {"dtype": torch.float64, **changes}
    cache = PagedKVCache(LAYERS, 40, KV_HEADS, DIM, value_dim=VALUE_DIM, page_size=4, **options)
    sequences = [cache.add() for _ in range(BATCH)]
    if form == "step":
        return lambda num_new: cache.step(sequences, num_new)
    return lambda num_new: cache.chunk(sequences, [num_new] * BATCH)


def model(tokens: Tensor, cache: StepCache, options: AttendOptions) -> Tensor:
    """Maps token numbers ``[B, S]`` to ``[B, S, 2 * (Hq * Dv + Hq)]``: outputs and lse of both layers."""
    positions = cache.positions(tokens.shape[1])
    assert positions.shape == tokens.shape
    computed = []
    for layer in range(LAYERS):
        made = [
            torch.stack([normal(1000 * layer + 10 * int(t) + i, heads, dim) for t in tokens.flatten()])
            .unflatten(0, tokens.shape)
            .transpose(1, 2)
            for i, (heads, dim) in enumerate(((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)))
        ]
        out, lse = cache.attend(layer, *made, return_lse=True, **options)
        if not isinstance(cache, KVCache):  # a paged step may store its tokens repeatedly
            assert torch.equal(cache.attend(layer, *made, **options), out)
        computed += [out.transpose(1, 2).flatten(2), lse.transpose(1, 2)]
    return torch.cat([*computed, positions[..., None].double()], dim=-1)


def generate(next_step: Callable[[int], StepCache], options: AttendOptions) -> Tensor:
    """Runs a prompt of 5 tokens per sequence and three steps, and returns all that the model computed."""
    outs = []
    for step, num_new in enumerate([5, 1, 1, 3]):
        cache = next_step(num_new)
        tokens = 100 * step + torch.arange(BATCH * num_new)
        outs.append(model(tokens.view(cache.batch, -1), cache, options).view(BATCH, num_new, -1))
    assert cache.lengths() == [10] * BATCH
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("options", [{}, OPTIONS, {"causal": False}], ids=["plain", "all options", "not causal"])
def test_a_model_takes_either(options: AttendOptions) -> None:
    expected = generate(contiguous(), options)
    torch.testing.assert_close(generate(in_pages("step"), options), expected)
    torch.testing.assert_close(generate(in_pages("chunk"), options), expected)


def test_a_model_takes_either_in_int8() -> None:
    expected = generate(contiguous(quantized=True), OPTIONS)
    torch.testing.assert_close(generate(in_pages("step", quantized=True), OPTIONS), expected)


def test_a_model_takes_either_under_autocast() -> None:
    options: AttendOptions = {"rotary_cos": OPTIONS["rotary_cos"], "rotary_sin": OPTIONS["rotary_sin"]}
    found = []
    for next_step in (contiguous, lambda **o: in_pages("step", **o), lambda **o: in_pages("chunk", **o)):
        cache = next_step(dtype=torch.bfloat16)(2)
        query, key, value = (
            normal(i, cache.batch, heads, 2 * BATCH // cache.batch, dim).float()
            for i, (heads, dim) in enumerate(((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)))
        )
        with torch.autocast("cpu", torch.bfloat16):
            found.append(cache.attend(0, query, key, value, **options))
    assert {out.dtype for out in found} == {torch.bfloat16}


NEW = {"query": (HEADS, DIM), "k_new": (KV_HEADS, DIM), "v_new": (KV_HEADS, VALUE_DIM)}
CACHES = {"KVCache": contiguous, "PagedStep": lambda: in_pages("step"), "PagedChunk": lambda: in_pages("chunk")}
SET_BY_THE_CACHE = [
    "block_table",
    "k_cache",
    "v_cache",
    "k_scale",
    "v_scale",
    "cache_seqlens",
    "key",
    "value",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", [*SET_BY_THE_CACHE, "dropout_p", "bias", "windows"])
def test_an_argument_that_is_not_the_models_is_refused_by_name(name: str, kind: str) -> None:
    cache = CACHES[kind]()(1)
    new = [normal(1, cache.batch, heads, BATCH // cache.batch, dim) for heads, dim in NEW.values()]
    why = "passes it itself" if name in SET_BY_THE_CACHE else "takes no such argument; .*window"
    with pytest.raises(TypeError, match=rf"^{name}: {kind}\.attend.* {why}"):
        cache.attend(0, *new, **{name: None})
    assert cache.lengths() == [0] * BATCH


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ("return_softmax_lse", "it is called 'return_lse' here"),
        ("attn_mask", "window and tree_mask restrict"),
        ("options", "it takes alibi_slopes, .*return_lse"),
    ],
)
def test_what_an_option_is_called_here(theirs: str, advice: str) -> None:
    new = [normal(1, BATCH, heads, 1, dim) for heads, dim in NEW.values()]
    with pytest.raises(TypeError, match=rf"^{theirs}: KVCache\.attend takes no such argument; .*{advice}"):
        contiguous()(1).attend(0, *new, **{theirs: None})


def test_append_takes_what_concerns_keys() -> None:
    cache = contiguous()(1)
    assert isinstance(cache, KVCache)
    new = [normal(1, BATCH, KV_HEADS, 1, dim) for dim in (DIM, VALUE_DIM)]
    with pytest.raises(TypeError, match="block_table"):
        cache.append(0, *new, block_table=torch.zeros(BATCH, 1).int())  # type: ignore[call-arg]
    with pytest.raises(InputError, match="rotary_sin"):
        cache.append(0, *new, rotary_cos=torch.ones(4, 2))
    assert cache.lengths() == [0] * BATCH
