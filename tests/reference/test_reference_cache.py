"""Tests the oracle itself: attention over a KV cache, against plain Python loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import attention_by_hand, normal, quantized_by_hand, rotated_by_hand
from fastattn import reference

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 3, 4, 2, 4, 2
LENGTHS = (0, 5, 6)  # before the append: empty, half full, nearly full
CAPACITY, PAGE_SIZE = 8, 4
TABLE = [[5, 0], [2, 7], [1, 4]]  # pages 3 and 6 belong to no sequence
NUM_PAGES = 8


def angles(positions: int, half: int) -> dict[str, Tensor]:
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor([0.7, 0.1], dtype=torch.float64)[:half]
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}


class Caches:
    """Both caches of one kind, with NaN (or int8 garbage) where there is no token, and the tokens as lists."""

    def __init__(self, paged: bool, int8: bool) -> None:
        self.paged, self.int8 = paged, int8
        num_blocks, rows = (NUM_PAGES, PAGE_SIZE) if paged else (BATCH, CAPACITY)
        self.scales: list[Tensor | None] = [None, None]
        self.stores: list[Tensor] = []
        self.tokens: list[list[list[list[list[float]]]]] = []  # per cache, sequence and head: rows
        for index, dim in enumerate((DIM, VALUE_DIM)):
            store = torch.full((num_blocks, KV_HEADS, rows, dim), math.nan, dtype=torch.float64)
            if int8:
                store = torch.full_like(store, 99, dtype=torch.int8)
                self.scales[index] = torch.full(store.shape[:3], math.nan, dtype=torch.float64)
            self.stores.append(store)
            self.tokens.append([])
            for b, length in enumerate(LENGTHS):
                content = normal(20 + 10 * index + b, KV_HEADS, length, dim)
                self.tokens[index].append(
                    [
                        [self.write(index, b, g, t, row) for t, row in enumerate(content[g].tolist())]
                        for g in range(KV_HEADS)
                    ]
                )
        self.table = torch.tensor(TABLE, dtype=torch.int32) if paged else None

    def place(self, b: int, t: int) -> tuple[int, int]:
        return (TABLE[b][t // PAGE_SIZE], t % PAGE_SIZE) if self.paged else (b, t)

    def write(self, index: int, b: int, g: int, t: int, row: list[float]) -> list[float]:
        """Stores one token's head, and returns the numbers that can be read back."""
        block, slot = self.place(b, t)
        scales = self.scales[index]
        if scales is None:
            self.stores[index][block, g, slot] = torch.tensor(row, dtype=torch.float64)
            return row
        quantized, scale = quantized_by_hand(row)
        self.stores[index][block, g, slot] = torch.tensor(quantized, dtype=torch.int8)
        scales[block, g, slot] = scale
        return [x * scale for x in quantized]

    def arguments(self) -> dict[str, Any]:
        return {
            "k_cache": self.stores[0],
            "v_cache": self.stores[1],
            "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
            "block_table": self.table,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
        }


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window": (2, -1)},
    "window both ways": {"window": (1, 1), "causal": False},
    "softcap, alibi, sinks": {"softcap": 0.9, "alibi_slopes": normal(40, HEADS).abs(), "sinks": normal(41, HEADS)},
    "rotary": angles(CAPACITY + 1, DIM // 2),
    "interleaved rotary": {**angles(CAPACITY + 1, DIM // 2), "rotary_interleaved": True},
    "rotary of half the dims": angles(CAPACITY + 1, DIM // 4),
}


@pytest.mark.parametrize("num_new", [0, 1, 2])
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("int8", [False, True], ids=["float cache", "int8 cache"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", OPTIONS)
def test_kv_cache_is_the_plain_loop(name: str, paged: bool, int8: bool, num_queries: int, num_new: int) -> None:
    options = dict(OPTIONS[name])
    actual, expected = Caches(paged, int8), Caches(paged, int8)
    query = normal(1, BATCH, HEADS, num_queries, DIM)
    new = normal(2, BATCH, KV_HEADS, num_new, DIM), normal(3, BATCH, KV_HEADS, num_new, VALUE_DIM)
    if num_new:
        options |= {"k_new": new[0], "v_new": new[1]}
    out, lse = reference.attention_with_kv_cache(query, **actual.arguments(), **options)

    cos, sin = options.pop("rotary_cos", None), options.pop("rotary_sin", None)
    interleaved = options.pop("rotary_interleaved", False)
    options.setdefault("causal", True)
    for unused in ("k_new", "v_new"):
        options.pop(unused, None)

    def rotated(row: list[float], position: int) -> list[float]:
        position = max(position, 0)
        return row if cos is None else rotated_by_hand(row, cos[position].tolist(), sin[position].tolist(), interleaved)

    for b, before in enumerate(LENGTHS):
        for j, (g, index) in itertools.product(range(num_new), itertools.product(range(KV_HEADS), range(2))):
            row = new[index][b, g, j].tolist()
            row = rotated(row, before + j) if index == 0 else row
            expected.tokens[index][b][g].append(expected.write(index, b, g, before + j, row))
        total = before + num_new
        turned = [
            [rotated(query[b, h, i].tolist(), total - num_queries + i) for i in range(num_queries)]
            for h in range(HEADS)
        ]
        key, value = (
            torch.tensor(expected.tokens[index][b], dtype=torch.float64).view(1, KV_HEADS, total, dim)
            for index, dim in enumerate((DIM, VALUE_DIM))
        )
        own_out, own_lse = attention_by_hand(torch.tensor([turned], dtype=torch.float64), key, value, **options)
        torch.testing.assert_close(out[b], own_out[0])
        torch.testing.assert_close(lse[b], own_lse[0])
    for index in range(2):
        torch.testing.assert_close(actual.stores[index], expected.stores[index], equal_nan=True)
        torch.testing.assert_close(actual.scales[index], expected.scales[index], equal_nan=True)


def test_tokens_that_do_not_fit_are_absent() -> None:
    k_cache, v_cache = normal(1, 3, 1, 4, 2), normal(2, 3, 1, 4, 2)
    untouched = k_cache.clone()
    k_new, v_new = normal(3, 3, 1, 3, 2), normal(4, 3, 1, 3, 2)
    query = normal(5, 3, 1, 1, 2)
    lengths = torch.tensor([2, 99, -5], dtype=torch.int32)
    out, _ = reference.attention_with_kv_cache(query, k_cache, v_cache, lengths, k_new=k_new, v_new=v_new)
    assert torch.equal(k_cache[0], torch.cat([untouched[0, :, :2], k_new[0, :, :2]], dim=1))
    assert torch.equal(k_cache[1], untouched[1])
    assert torch.equal(k_cache[2], torch.cat([k_new[2], untouched[2, :, 3:]], dim=1))
    for b, total in enumerate((4, 4, 3)):
        expected, _ = reference.attention(query[[b]], k_cache[[b], :, :total], v_cache[[b], :, :total])
        torch.testing.assert_close(out[b], expected[0])


def test_pages_out_of_range_are_absent() -> None:
    k_pages, v_pages = normal(1, 3, 1, 2, 2), normal(2, 3, 1, 2, 2)
    before = k_pages.clone()
    table = torch.tensor([[1, 77], [-1, 2]], dtype=torch.int32)
    query, new = normal(3, 2, 1, 1, 2), normal(4, 2, 1, 1, 2)
    out, _ = reference.attention_with_kv_cache(
        query, k_pages, v_pages, torch.tensor([3, 2], dtype=torch.int32), k_new=new, v_new=new, block_table=table
    )
    expected_pages = before.clone()
    expected_pages[2, :, 0] = new[1, :, 0]
    assert torch.equal(k_pages, expected_pages)
    torch.testing.assert_close(out[0], reference.attention(query[:1], k_pages[[1]], v_pages[[1]])[0][0])
    torch.testing.assert_close(out[1], v_pages[2, :, :1])


@pytest.mark.parametrize("shape", [(0, 1, 1), (2, 0, 1), (2, 1, 0)], ids=["no sequence", "no query", "no capacity"])
def test_empty_caches(shape: tuple[int, int, int]) -> None:
    batch, num_queries, capacity = shape
    caches = normal(1, batch, 1, capacity, 2), normal(2, batch, 1, capacity, 3)
    lengths = torch.zeros(batch, dtype=torch.int32)
    new: dict[str, Any] = {"k_new": normal(3, batch, 1, 1, 2), "v_new": normal(4, batch, 1, 1, 3)}
    out, lse = reference.attention_with_kv_cache(normal(5, batch, 2, num_queries, 2), *caches, lengths, **new)
    assert out.shape == (batch, 2, num_queries, 3)
    assert lse.shape == (batch, 2, num_queries)
    if capacity == 0:
        assert not bool(out.any())
        assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_kv_cache_compiles(paged: bool) -> None:
    compiled = torch.compile(reference.attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    eager_caches, compiled_caches = Caches(paged, int8=True), Caches(paged, int8=True)
    query, k_new = normal(1, BATCH, HEADS, 1, DIM), normal(2, BATCH, KV_HEADS, 1, DIM)
    options = {"k_new": k_new, "v_new": normal(3, BATCH, KV_HEADS, 1, VALUE_DIM), **OPTIONS["rotary"]}
    expected, _ = reference.attention_with_kv_cache(query, **eager_caches.arguments(), **options)
    torch.testing.assert_close(compiled(query, **compiled_caches.arguments(), **options)[0], expected)
    assert torch.equal(compiled_caches.stores[0], eager_caches.stores[0])
