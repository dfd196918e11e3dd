"""Tests PagedKVCache: which pages forks share and when they are copied, chunks, full pools, and bad input.

test_paged_cache_machine.py draws operations in any order.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fastattn
from by_hand import normal
from fastattn import InputError, reference
from fastattn.cache.paged import PagedKVCache
from fastattn.errors import CacheFull

LAYERS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 16, 8
PAGES, PAGE_SIZE = 12, 4


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def cache_of(**changes: Any) -> PagedKVCache:
    usual: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_pages": PAGES,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "value_dim": VALUE_DIM,
        "page_size": PAGE_SIZE,
        "dtype": torch.float64,
    }
    return PagedKVCache(**{**usual, **changes})


# Each token is a number, which together with the layer determines its key and value.
def keys(layer: int, numbers: list[int]) -> Tensor:
    """Returns keys ``[1, Hkv, n, D]``."""
    rows = [normal(1000 * layer + 2 * n, KV_HEADS, 1, DIM) for n in numbers]
    return torch.cat(rows, dim=1)[None] if rows else torch.zeros(1, KV_HEADS, 0, DIM).double()


def values(layer: int, numbers: list[int]) -> Tensor:
    """Returns values ``[1, Hkv, n, Dv]``."""
    rows = [normal(1000 * layer + 2 * n + 1, KV_HEADS, 1, VALUE_DIM) for n in numbers]
    return torch.cat(rows, dim=1)[None] if rows else torch.zeros(1, KV_HEADS, 0, VALUE_DIM).double()


def queries(batch: int, count: int) -> Tensor:
    return normal(7, batch, HEADS, count, DIM)


class Model:
    """A cache, and the numbers of the tokens that each sequence should hold."""

    def __init__(self, **changes: Any) -> None:
        self.cache = cache_of(**changes)
        self.contents: dict[int, list[int]] = {}
        self.next_token = 0

    def add(self) -> int:
        sequence = self.cache.add()
        self.contents[sequence] = []
        return sequence

    def fork(self, parent: int, length: int | None = None) -> int:
        child = self.cache.fork(parent, length)
        self.contents[child] = self.contents[parent][:length]
        return child

    def free(self, sequence: int) -> None:
        self.cache.free(sequence)
        del self.contents[sequence]

    def step(self, sequences: list[int], num_new: int) -> None:
        """Appends new tokens through every layer; attention must see the tokens that should be there."""
        step = self.cache.step(sequences, num_new)
        new = [
            list(range(self.next_token + i * num_new, self.next_token + (i + 1) * num_new))
            for i in range(len(sequences))
        ]
        self.next_token += num_new * len(sequences)
        for sequence, numbers in zip(sequences, new, strict=True):
            self.contents[sequence] += numbers
        query = queries(len(sequences), max(num_new, 1))
        for layer in range(LAYERS):
            k_new, v_new = (torch.cat([of(layer, numbers) for numbers in new]) for of in (keys, values))
            out = step.attend(layer, query, k_new, v_new)
            for row, sequence in enumerate(sequences):
                numbers = self.contents[sequence]
                expected = fastattn.attention(
                    query[row : row + 1], keys(layer, numbers), values(layer, numbers), causal=True
                )
                torch.testing.assert_close(out[row : row + 1], expected)

    def check(self) -> None:
        """Checks that each page is free or has the right reference count, and holds the bits that were stored."""
        cache = self.cache
        assert cache.sequences == list(self.contents)
        users = Counter(page for sequence in cache.sequences for page in cache.pages(sequence))
        assert [users[page] for page in range(PAGES)] == cache._pool.references
        assert sorted(cache._pool.free_pages) == [page for page in range(PAGES) if not users[page]]
        assert cache.num_free_pages == PAGES - len(users)
        for sequence, numbers in self.contents.items():
            pages = cache.pages(sequence)
            assert cache.length(sequence) == len(numbers)
            assert len(pages) == -(-len(numbers) // PAGE_SIZE)
            for layer in range(LAYERS):
                for name, of in (("k_cache", keys), ("v_cache", values)):
                    stored = cache.arguments(layer)[name][pages].transpose(0, 1).flatten(1, 2)[None, :, : len(numbers)]
                    assert torch.equal(stored, of(layer, numbers))

    def snapshot(self) -> Any:
        cache = self.cache
        tables = {s: (cache.length(s), cache.pages(s)) for s in cache.sequences}
        return tables, cache._pool.references[:], cache._pool.free_pages[:]


def test_a_fork_shares_until_somebody_writes() -> None:
    model = Model()
    parent = model.add()
    model.step([parent], 6)  # a full page and a half
    free = model.cache.num_free_pages
    child = model.fork(parent)
    assert model.cache.pages(child) == model.cache.pages(parent)
    assert model.cache.num_free_pages == free

    model.step([child], 1)  # copies the half-full page
    assert model.cache.pages(child)[0] == model.cache.pages(parent)[0]
    assert model.cache.pages(child)[1] != model.cache.pages(parent)[1]
    assert model.cache.num_free_pages == free - 1

    pages = model.cache.pages(parent)
    model.step([parent], 1)  # its half-full page is no longer shared: written in place
    assert model.cache.pages(parent) == pages
    assert model.cache.num_free_pages == free - 1
    model.check()

    model.free(parent)
    assert model.cache.num_free_pages == free  # the child still has the full page
    model.step([child], 3)
    model.check()


def test_in_one_step_all_but_the_last_writer_copy() -> None:
    model = Model()
    parent = model.add()
    model.step([parent], 2)
    children = [model.fork(parent), model.fork(parent)]
    (shared,) = model.cache.pages(parent)
    free = model.cache.num_free_pages
    model.step([parent, *children], 1)
    pages = [model.cache.pages(sequence)[0] for sequence in (parent, *children)]
    assert len(set(pages)) == 3
    assert shared in pages
    assert model.cache.num_free_pages == free - 2
    model.check()


def test_full_pages_are_never_copied() -> None:
    model = Model()
    parent = model.add()
    model.step([parent], 2 * PAGE_SIZE)
    children = [model.fork(parent) for _ in range(3)]
    model.step(children, 1)
    assert all(model.cache.pages(child)[:2] == model.cache.pages(parent) for child in children)
    assert model.cache.num_free_pages == PAGES - 2 - 3
    model.check()


def test_a_fork_of_a_prefix_takes_the_pages_of_the_prefix() -> None:
    model = Model()
    parent = model.add()
    model.step([parent], 10)
    child = model.fork(parent, 5)
    assert model.cache.length(child) == 5
    assert model.cache.pages(child) == model.cache.pages(parent)[:2]
    model.step([child, parent], 3)
    model.check()


def test_chunks_of_different_lengths_attend_to_all_that_their_sequences_have() -> None:
    """Over shuffled and shared pages, the result is causal attention over the whole sequences."""
    cache = cache_of()
    a, b, c = cache.add(), cache.add(), cache.add()
    written: dict[int, list[Tensor]] = {a: [], b: [], c: []}

    def take_in(sequences: list[int], counts: list[int]) -> None:
        query, new = (torch.randn(sum(counts), n, d) for n, d in ((HEADS, DIM), (KV_HEADS, DIM + VALUE_DIM)))
        query, new = query.to(cache.layout.dtype), new.to(cache.layout.dtype)
        chunk = cache.chunk(sequences, counts)
        out = chunk.attend(1, query, new[..., :DIM], new[..., DIM:])
        chunk.commit()  # the other layer stores nothing
        parts = (each.split(counts) for each in (query, new, out))
        for sequence, rows, tokens, got in zip(sequences, *parts, strict=True):
            written[sequence].append(tokens)
            whole = torch.cat(written[sequence]).transpose(0, 1)[None]
            expected, _ = reference.attention(
                rows.transpose(0, 1)[None], whole[..., :DIM], whole[..., DIM:], causal=True
            )
            torch.testing.assert_close(got.transpose(0, 1)[None], expected)
            assert cache.length(sequence) == whole.shape[2]

    take_in([a, b, c], [5, 0, 3])
    take_in([c, a, b], [0, 2, 9])
    fork = cache.fork(a)
    written[fork] = list(written[a])
    take_in([b, fork, c, a], [4, 2, 6, 1])  # first copies the page that a shares with its fork
    assert not cache.pools(0)[0].any()  # the other layer


def test_a_chunk_beyond_the_pool_changes_nothing() -> None:
    model = Model()
    sequences = [model.add(), model.add()]
    model.step(sequences, PAGE_SIZE)
    before = model.snapshot()
    with pytest.raises(CacheFull, match="this step needs 11 more pages of 4 tokens, and 10 of 12 are free"):
        model.cache.chunk(sequences, [10 * PAGE_SIZE, 1])
    assert model.snapshot() == before


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    model = Model()
    sequences = [model.add(), model.add()]
    model.step(sequences[:1], 10 * PAGE_SIZE)
    model.step(sequences[1:], PAGE_SIZE + 1)
    before = model.snapshot()
    with pytest.raises(CacheFull, match="this step needs 2 more pages of 4 tokens, and 0 of 12 are free"):
        model.cache.step(sequences, PAGE_SIZE)
    assert model.snapshot() == before
    child = model.fork(sequences[1])
    with pytest.raises(CacheFull, match="this step needs 1 more pages"):
        model.cache.step([child], 1)  # the pool has no page for the copy
    model.check()
    model.free(sequences[0])
    model.step([child, sequences[1]], PAGE_SIZE)
    model.check()


def test_tokens_that_some_layer_never_stores_are_told() -> None:
    cache = cache_of()
    sequence = cache.add()
    new = {"k_new": keys(0, [1]), "v_new": values(0, [1])}

    def attend_in_layer_0() -> None:
        cache.step([sequence], num_new=1).attend(0, queries(1, 1), **new)

    attend_in_layer_0()
    with pytest.warns(RuntimeWarning, match=r"dropped, because layers \[1\] of num_layers=2") as found:
        attend_in_layer_0()  # the model has one layer only: the last step was dropped
    assert [warning.filename for warning in found] == [__file__]
    with pytest.warns(RuntimeWarning, match="dropped"):
        assert cache.length(sequence) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = cache.step([sequence], num_new=1)
        step.attend(0, queries(1, 1), **new)
        step.cancel()
        cache.step([sequence], num_new=1)  # no layer attends
        assert cache.length(sequence) == 0


def test_numbers_are_never_used_again() -> None:
    cache = cache_of()
    first = cache.add()
    cache.free(first)
    assert cache.add() != first
    with pytest.raises(InputError, match=r"sequence: expected the number of a sequence.* \(one of \[1\]\), got 0"):
        cache.length(first)


def test_a_step_of_several_numbers_is_a_chunk() -> None:
    cache = cache_of()
    with pytest.raises(TypeError, match=r"num_new: expected an int, got list; chunk\(\) takes a number for each"):
        cache.step([cache.add()], [3])  # type: ignore[arg-type]


def test_the_step_has_a_table_and_the_lengths_before_it() -> None:
    cache = cache_of()
    a, b = cache.add(), cache.add()
    cache.step([a], 5).commit()
    step = cache.step([b, a], 2)
    assert step.cache_seqlens.tolist() == [0, 5]
    assert step.positions(2).tolist() == [[0, 1], [5, 6]]
    assert step.block_table.dtype == step.cache_seqlens.dtype == torch.int32
    table = step.block_table.tolist()
    step.commit()
    assert table == [[*cache.pages(b), -1], cache.pages(a)]
    empty = cache.step([], 1)
    assert empty.block_table.shape == (0, 1)


def test_the_other_sequences_stay_untouched() -> None:
    cache = cache_of()
    a, b = cache.add(), cache.add()
    full = cache.step([a], PAGE_SIZE)
    full.attend(0, queries(1, 1), keys(0, [1, 2, 3, 4]), values(0, [1, 2, 3, 4]))
    before = cache.arguments(0)["k_cache"].clone()
    step = cache.step([b], 2)
    step.attend(0, queries(1, 1), keys(0, [5, 6]), values(0, [5, 6]))
    step.commit()
    changed = (cache.arguments(0)["k_cache"] != before).any(-1).any(1)  # [page, row]
    assert changed.nonzero().tolist() == [[cache.pages(b)[0], 0], [cache.pages(b)[0], 1]]


def test_quantized_pages_are_copied_with_their_scales() -> None:
    cache = cache_of(quantized=True)
    parent = cache.add()
    for layer, step in enumerate([cache.step([parent], 3)] * LAYERS):
        step.attend(layer, queries(1, 1), keys(layer, [1, 2, 3]), values(layer, [1, 2, 3]))
    child = cache.fork(parent)
    step = cache.step([child], 1)
    for layer in range(LAYERS):
        out: Any = step.attend(layer, queries(1, 1), keys(layer, [4]), values(layer, [4]))
        rounded = []
        for tensor in (keys(layer, [1, 2, 3, 4]), values(layer, [1, 2, 3, 4])):
            quantized, scale = reference.quantize_rows(tensor)
            rounded.append(quantized.double() * scale.float().double()[..., None])
        torch.testing.assert_close(out, fastattn.attention(queries(1, 1), *rounded))
    assert "int8 on cpu" in repr(cache)
    assert cache.nbytes < cache_of().nbytes / 3


def test_fastattn_check_finds_the_steps_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    model = Model()
    a, b = model.add(), model.add()
    model.step([a], 5)
    model.step([a, b], 3)
    model.check()


def attend(**changes: Any) -> dict[str, Any]:
    usual = {"layer": 0, "query": queries(1, 1), "k_new": keys(0, [1]), "v_new": values(0, [1])}
    return {**usual, **changes}


C = cache_of()
S = C.add()
STEP = C.step([S], 1)
STEP.commit()
QUANTIZED = cache_of(quantized=True)
# name: (function, arguments, words of the message: argument, expected, came)
Misuse = dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]]
INPUT_ERRORS: Misuse = {
    "num_layers": (cache_of, {"num_layers": 0}, ("num_layers", "at least 1", "0")),
    "page_size": (cache_of, {"page_size": 0}, ("page_size", "at least 1", "0")),
    "kv_heads": (cache_of, {"kv_heads": 0}, ("kv_heads", "at least 1", "0")),
    "dtype": (cache_of, {"dtype": torch.int32}, ("dtype", "float16", "int32")),
    "device": (cache_of, {"device": "gpu"}, ("device: expected", "'gpu'")),
    "fork of nothing": (C.fork, {"sequence": 9}, ("sequence", "[0]", "9")),
    "fork too long": (C.fork, {"sequence": S, "length": 2}, ("length", "at most the 1 tokens", "2")),
    "fork negative": (C.fork, {"sequence": S, "length": -1}, ("length", "at least 0", "-1")),
    "free of nothing": (C.free, {"sequence": 9}, ("sequence", "[0]", "9")),
    "truncate longer": (C.truncate, {"sequence": S, "length": 2}, ("length", "at most the 1 tokens", "2")),
    "step of nothing": (C.step, {"sequences": [S, 9], "num_new": 1}, ("sequences: ", "[0]", "9")),
    "step twice": (C.step, {"sequences": [S, S], "num_new": 1}, ("sequences", "once", "[0, 0]")),
    "step negative": (C.step, {"sequences": [S], "num_new": -1}, ("num_new", "at least 0", "-1")),
    "step of a tensor": (
        C.step,
        {"sequences": torch.tensor([0]), "num_new": 1},
        ("sequences", "a list", "torch.Tensor; pass sequences.tolist()"),
    ),
    "step of one": (C.step, {"sequences": 3, "num_new": 1}, ("sequences", "a list", "3; pass [3]")),
    "chunk of one count": (C.chunk, {"sequences": [S], "num_new": 1}, ("num_new", "a list", "1")),
    "step of one of numpy": (
        C.step,
        {"sequences": numpy.int64(3), "num_new": 1},
        ("sequences", "a list", "3; pass [3]"),
    ),
    "chunk of one count of numpy": (C.chunk, {"sequences": [S], "num_new": numpy.int64(1)}, ("num_new", "a list", "1")),
    "query dtype": (STEP.attend, attend(query=queries(1, 1).half()), ("dtype", "dtype=torch.float16")),
    "chunk of nothing": (C.chunk, {"sequences": [9], "num_new": [1]}, ("sequences: ", "[0]", "9")),
    "chunk twice": (C.chunk, {"sequences": [S, S], "num_new": [1, 1]}, ("sequences", "once", "[0, 0]")),
    "chunk counts": (
        C.chunk,
        {"sequences": [S], "num_new": [1, 2]},
        ("num_new", "1 numbers, one for each sequence", "[1, 2]"),
    ),
    "chunk negative": (C.chunk, {"sequences": [S], "num_new": [-1]}, ("num_new", "at least 0", "-1")),
    "chunk of int8": (
        QUANTIZED.chunk,
        {"sequences": [], "num_new": []},
        ("quantized", "False", "torch.int8; use step()"),
    ),
    "layer": (STEP.attend, attend(layer=2), ("layer", "0 to 1", "2")),
    "k_new count": (STEP.attend, attend(k_new=keys(0, [1, 2])), ("k_new", "1 new tokens", "2")),
    "query batch": (STEP.attend, attend(query=queries(2, 1)), ("query", "1 as first", "[2, 4, 1, 16]")),
}
TYPE_ERRORS: Misuse = {
    "num_pages": (cache_of, {"num_pages": 1.0}, ("num_pages", "int", "float")),
    "quantized": (cache_of, {"quantized": 1}, ("quantized", "bool", "int")),
    "block_size": (cache_of, {"block_size": 4}, ("PagedKVCache() got", "it is called 'page_size' here")),
    "batch_size": (cache_of, {"batch_size": 4}, ("'batch_size'", "add() makes one")),
    "capacity": (cache_of, {"capacity": 99}, ("'capacity'", "num_pages * page_size tokens")),
    "step of a name": (C.step, {"sequences": ["a"], "num_new": 1}, ("sequences: ", "int", "str")),
    "fork type": (C.fork, {"sequence": "a"}, ("sequence", "int", "str")),
    "step of None": (C.step, {"sequences": None, "num_new": 1}, ("sequences", "a list", "NoneType")),
    "chunk of no counts": (C.chunk, {"sequences": [S], "num_new": None}, ("num_new", "a list", "NoneType")),
    "step type": (C.step, {"sequences": [S], "num_new": None}, ("num_new", "int", "NoneType")),
    "k_new type": (STEP.attend, attend(k_new=None), ("k_new", "torch.Tensor", "NoneType")),
}


@pytest.mark.parametrize("case", INPUT_ERRORS | TYPE_ERRORS)
def test_bad_input_is_refused(case: str) -> None:
    function, arguments, words = (INPUT_ERRORS | TYPE_ERRORS)[case]
    kind = InputError if case in INPUT_ERRORS else TypeError
    before = C.sequences, C.pages(S), C.num_free_pages, C.arguments(0)["k_cache"].clone()
    with pytest.raises(kind) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert (C.sequences, C.pages(S), C.num_free_pages) == before[:3]
    assert torch.equal(C.arguments(0)["k_cache"], before[3])
