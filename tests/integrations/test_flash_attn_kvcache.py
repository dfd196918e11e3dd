"""Compares ``flash_attn_with_kvcache`` with the formulas that it computes, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.integrations.flash_attn import flash_attn_with_kvcache
from flash_formulas import flash_attention, rotated

BATCH, CAPACITY, HEADS, KV_HEADS, DIM = 3, 10, 4, 2, 8
LENGTHS = torch.tensor([5, 0, 7], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SCALES = torch.tensor([[0.5, 1.25], [2.0, 0.75], [1.0, 3.0]])
ANGLES = torch.outer(torch.arange(16.0, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cache(seed: int, batch: int = BATCH) -> Tensor:
    """Returns a cache with NaN where there is no token."""
    filled = random(batch, CAPACITY, KV_HEADS, DIM, seed=seed)
    if batch == BATCH:
        filled[torch.arange(CAPACITY) >= LENGTHS[:, None]] = math.nan
    return filled


def wanted_of(q: Tensor, k: list[Tensor], v: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Returns output and lse, computed sequence by sequence."""
    parts = [
        flash_attention(query[None], key[None], value[None], **options)
        for query, key, value in zip(q, k, v, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def with_new(filled: Tensor, new: Tensor) -> list[Tensor]:
    return [torch.cat([row[:length], own]) for row, length, own in zip(filled, LENGTHS.tolist(), new, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 0)},
        {"softcap": 1.5},
        {"causal": True, "alibi_slopes": SLOPES},
        {"alibi_slopes": SLOPES},
        {"softmax_scale": 0.3},
        {"learnable_sink": SLOPES.double()},
    ],
    ids=["plain", "causal", "window", "softcap", "causal ALiBi", "ALiBi", "scale", "sinks"],
)
@pytest.mark.parametrize("num_new", [0, 2, 3])
def test_appends_and_attends(options: dict[str, Any], num_new: int) -> None:
    q = random(BATCH, 2, HEADS, DIM)
    k_cache, v_cache = cache(1), cache(2)
    k, v = (random(BATCH, num_new, KV_HEADS, DIM, seed=seed) for seed in (3, 4))
    keys, values = with_new(k_cache, k), with_new(v_cache, v)
    new = {"k": k, "v": v} if num_new else {}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, **new, cache_seqlens=LENGTHS, return_softmax_lse=True, **options
    )
    torch.testing.assert_close((out, lse), wanted_of(q, keys, values, **options))
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        assert torch.equal(k_cache[row, : len(key)], key) and torch.equal(v_cache[row, : len(value)], value)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (3, -1)}], ids=["none", "causal", "window"])
@pytest.mark.parametrize(("num_queries", "num_new"), [(1, 1), (2, 2), (3, 1), (1, 2)])
def test_rotary(num_queries: int, num_new: int, mask: dict[str, Any], interleaved: bool) -> None:
    """Without a mask, all queries rotate like the token at ``cache_seqlens``; else each has its own position."""
    q = random(BATCH, num_queries, HEADS, DIM)
    k_cache, v_cache = cache(1), cache(2)
    k, v = (random(BATCH, num_new, KV_HEADS, DIM, seed=seed) for seed in (3, 4))
    cos, sin = ANGLES.cos(), ANGLES.sin()
    first = LENGTHS.long()[:, None]
    of_queries = first + torch.arange(num_queries) if mask else first.expand(-1, num_queries)
    turned_q = rotated(q, cos, sin, of_queries, interleaved)
    turned_k = rotated(k, cos, sin, first + torch.arange(num_new), interleaved)
    wanted = wanted_of(turned_q, with_new(k_cache, turned_k), with_new(v_cache, v), **mask)[0]
    by_default = {} if interleaved else {"rotary_interleaved": False}
    came = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=LENGTHS, **by_default, **mask)
    torch.testing.assert_close(came, wanted)
    assert torch.equal(k_cache[1, :num_new], turned_k[1])


@pytest.mark.parametrize("page_size", [1, 3, 5])
@pytest.mark.parametrize("keyword", ["block_table", "page_table"])
def test_pages_of_any_size(page_size: int, keyword: str) -> None:
    num_pages = -(-CAPACITY // page_size)
    table = torch.randperm(BATCH * num_pages, generator=torch.Generator().manual_seed(0)).view(BATCH, -1).int()
    k_pages, v_pages = (random(BATCH * num_pages, page_size, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    rows_k, rows_v = (pages[table.long()].flatten(1, 2)[:, :CAPACITY] for pages in (k_pages, v_pages))
    q = random(BATCH, 1, HEADS, DIM)
    k, v = (random(BATCH, 1, KV_HEADS, DIM, seed=seed) for seed in (3, 4))
    wanted = wanted_of(q, with_new(rows_k, k), with_new(rows_v, v))[0]
    came = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=LENGTHS, **{keyword: table})
    torch.testing.assert_close(came, wanted)
    assert torch.equal(k_pages[table.long()].flatten(1, 2)[0, 5], k[0, 0])


def test_rows_of_the_cache_in_another_order() -> None:
    k_cache, v_cache = cache(1, batch=5), cache(2, batch=5)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    q, k = random(BATCH, 1, HEADS, DIM), random(BATCH, 1, KV_HEADS, DIM, seed=3)
    wanted = wanted_of(q, with_new(k_cache[rows], k), with_new(v_cache[rows], k))[0]
    came = flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=LENGTHS, cache_batch_idx=rows)
    torch.testing.assert_close(came, wanted)
    assert torch.equal(k_cache[4, 5], k[0, 0])


@pytest.mark.parametrize("rows", [None, [3, 0, 1]], ids=["in order", "another order"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_size": (3, 0)}, {"alibi_slopes": SLOPES}], ids=["plain", "window", "ALiBi"]
)
def test_sequences_that_begin_later(rows: list[int] | None, options: dict[str, Any]) -> None:
    """Rotary positions still count from the row's start; windows and ALiBi count from the sequence's start."""
    k_cache, v_cache = cache(1, batch=4), cache(2, batch=4)
    leftpad = torch.tensor([2, 0, 3], dtype=torch.int32)
    order = rows or [0, 1, 2]
    used_k, used_v = k_cache[order].clone(), v_cache[order].clone()
    q, k = random(BATCH, 2, HEADS, DIM), random(BATCH, 2, KV_HEADS, DIM, seed=3)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    lengths = [5, 2, 7]
    first = torch.tensor(lengths)[:, None]
    places = first + torch.arange(2)
    of_queries = places if "window_size" in options else first.expand(-1, 2)
    turned_q, turned_k = rotated(q, cos, sin, of_queries, True), rotated(k, cos, sin, places, True)
    places_before = [slice(int(pad), length) for pad, length in zip(leftpad, lengths, strict=True)]
    keys = [torch.cat([row[place], own]) for row, place, own in zip(used_k, places_before, turned_k, strict=True)]
    values = [torch.cat([row[place], own]) for row, place, own in zip(used_v, places_before, k, strict=True)]
    caches = (k_cache, v_cache) if rows else (k_cache[:3], v_cache[:3])
    came = flash_attn_with_kvcache(
        *(q, *caches, k, k, cos, sin),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cache_batch_idx=None if rows is None else torch.tensor(rows, dtype=torch.int32),
        cache_leftpad=leftpad,
        **options,
    )
    torch.testing.assert_close(came, wanted_of(turned_q, keys, values, **options)[0])
    assert torch.equal(k_cache[order[0], 5:7], turned_k[0])


def test_lengths_by_an_int_and_by_default() -> None:
    q, filled = random(BATCH, 1, HEADS, DIM), random(BATCH, CAPACITY, KV_HEADS, DIM, seed=1)
    for lengths, number in ((4, 4), (None, CAPACITY)):
        came = flash_attn_with_kvcache(q, filled, filled, cache_seqlens=lengths)
        torch.testing.assert_close(came, flash_attention(q, filled[:, :number], filled[:, :number])[0])


def test_tensors_that_want_gradients_get_none() -> None:
    q, filled = random(BATCH, 1, HEADS, DIM).requires_grad_(), random(BATCH, CAPACITY, KV_HEADS, DIM, seed=1)
    assert not flash_attn_with_kvcache(q, filled, filled).requires_grad


def fp8(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_descales_multiply_fp8_numbers(paged: bool) -> None:
    q, new = fp8(BATCH, 2, HEADS, DIM, seed=1), [fp8(BATCH, 2, KV_HEADS, DIM, seed=seed) for seed in (2, 3)]
    pages = [fp8(BATCH, CAPACITY, KV_HEADS, DIM, seed=seed) for seed in (4, 5)]
    descales = {"q_descale": SCALES.flip(0), "k_descale": SCALES, "v_descale": SCALES.flip(1)}

    def in_full(numbers: Tensor, name: str) -> Tensor:
        descale = descales[name][:, None, :, None].double()
        return numbers.double() * descale.repeat_interleave(numbers.shape[2] // KV_HEADS, dim=2)

    names = ("k_descale", "v_descale")
    k, v = (with_new(in_full(page, n), in_full(own, n)) for page, own, n in zip(pages, new, names, strict=True))
    wanted, wanted_lse = wanted_of(in_full(q, "q_descale"), k, v, causal=True, softcap=2.0)

    order = torch.tensor([2, 0, 1])  # the page of each sequence
    table = {"block_table": order[:, None].int()} if paged else {}
    caches = [page[order.argsort()].clone() if paged else page.clone() for page in pages]
    options = {"causal": True, "softcap": 2.0, "return_softmax_lse": True, **table}
    out, lse = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=LENGTHS, **options, **descales)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2**-6, atol=2**-5)
    for cached, own in zip(caches, new, strict=True):  # new tokens are stored as they came
        rows = cached[order] if paged else cached
        for sequence, length in enumerate(LENGTHS.tolist()):
            assert torch.equal(rows[sequence, length : length + 2].float(), own[sequence].float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_descale": SCALES[:, :1]}, r"^k_descale: expected shape \[B, Hk\] = \[3, 2\], got \[3, 1\]"),
        ({"k_descale": SCALES.double()}, "^k_descale: expected torch.float32, got torch.float64"),
        ({"q_descale": SCALES, "q": random(3, 1, 4, 8).bfloat16()}, "^q_descale: expected None, as q is not fp8"),
        ({"k_descale": SCALES, "q": fp8(3, 1, 3, 8, seed=0)}, "^q: expected a multiple of the 2 heads of k_cache"),
        (
            {"k": random(3, 1, 2, 8).bfloat16(), "v": fp8(3, 1, 2, 8, seed=0), "k_descale": SCALES},
            r"^k: expected float8_e4m3fn with k_descale, .*; divide by k_descale and cast with \.to\(torch\.float8",
        ),
    ],
    ids=["shape", "dtype", "q", "heads", "new keys"],
)
def test_descales_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    filled = fp8(BATCH, CAPACITY, KV_HEADS, DIM, seed=1)
    call = {"q": fp8(BATCH, 1, HEADS, DIM, seed=2), "cache_seqlens": LENGTHS, **changes}
    with pytest.raises(fastattn.InputError, match=message):
        flash_attn_with_kvcache(k_cache=filled, v_cache=filled.clone(), **call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, "^rotary_cos: expected None without new keys"),
        ({"k": random(3, 1, 2, 8), "v": random(3, 1, 2, 8)}, "^cache_seqlens: expected an int or a tensor"),
        (
            {"cache_leftpad": LENGTHS, "block_table": LENGTHS[:, None]},
            "^cache_leftpad: expected None with a block_table, got a tensor; paged .* without padding$",
        ),
        (
            {"cache_batch_idx": LENGTHS, "block_table": LENGTHS[:, None]},
            r"^cache_batch_idx: expected None with a block_table, got a tensor; "
            r"pass block_table\[cache_batch_idx\] instead$",
        ),
        ({"cu_seqlens_q": LENGTHS}, "^cu_seqlens_q: expected None in flash_attn_with_kvcache"),
        ({"rotary_seqlens": LENGTHS}, "^rotary_seqlens: expected None in flash_attn_with_kvcache"),
        ({"q_descale": SCALES}, "^q_descale: expected None, as q is not fp8, got a tensor"),
        ({"v_descale": SCALES}, "^v_descale: expected None, as k_cache and v_cache are not fp8, got a tensor"),
        (
            {"block_table": torch.tensor([[2], [-1], [0]]).int()},
            "^block_table: expected pages .*-1 as page 0 of sequence",
        ),
        ({"cache_seqlens": LENGTHS + 4}, "^cache_seqlens: expected at most 10.* got 11 for sequence 2"),
        ({"cache_batch_idx": LENGTHS}, "^cache_batch_idx: expected rows from 0 to 2, got 5 for sequence 0"),
        (
            {"cache_leftpad": LENGTHS, "cache_seqlens": LENGTHS.flip(0)},
            "^cache_leftpad: expected at least 0 and at most 5, the tokens in the row, got 7 for sequence 2",
        ),
        ({"cache_leftpad": LENGTHS, "cache_seqlens": LENGTHS + 4}, "^cache_seqlens: expected at most 10.* got 11"),
        (
            {"k": random(3, 1, 2, 8), "v": random(3, 1, 2, 8), "cache_seqlens": LENGTHS, "cache_leftpad": LENGTHS}
            | {"rotary_cos": ANGLES[:7], "rotary_sin": ANGLES[:7]},
            "^rotary_cos: expected at least 8 rows, one for each position, got 7",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " and ".join(value),
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    q, filled = random(BATCH, 1, HEADS, DIM), random(BATCH, CAPACITY, KV_HEADS, DIM, seed=1)
    with pytest.raises(fastattn.InputError, match=message):
        flash_attn_with_kvcache(q, filled, filled.clone(), **changes)
