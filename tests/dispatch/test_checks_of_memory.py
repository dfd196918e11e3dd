"""Tests checks of values in memory (lengths, offsets, tables): always on a CPU, elsewhere if FASTATTN_CHECK is set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn


@pytest.mark.parametrize("word", ["1", "true", "yes", "TRUE", "0", "false", "no", "No", "", None])
def test_words_for_yes_and_no(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTATTN_CHECK", raising=False)
    if word is not None:
        monkeypatch.setenv("FASTATTN_CHECK", word)
    weight = torch.tensor([[1.0, math.nan]])
    if (word or "no").lower() in ("1", "true", "yes"):
        with pytest.raises(fastattn.InputError, match=r"^weight: expected finite"):
            fastattn.quantize_int8(weight)
    else:
        fastattn.quantize_int8(weight)


@pytest.mark.parametrize("word", ["2", "on", "ture"])
def test_other_words_are_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CHECK", word)
    with pytest.raises(fastattn.InputError, match=rf"^FASTATTN_CHECK: expected 1, true, yes, 0, false, no.*'{word}'"):
        fastattn.quantize_int8(torch.ones(1, 1))


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def varlen(offsets: Tensor, **changes: Any) -> Tensor:
    x = torch.ones(5, 1, 4)
    usual: dict[str, Any] = {"query": x, "key": x, "value": x, "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": offsets}
    return fastattn.attention_varlen(**(usual | {"max_seqlen_q": 3, "max_seqlen_k": 3} | changes))


def paged(table: Tensor) -> Tensor:
    pages = torch.ones(2, 1, 2, 4)
    return varlen(ints(0, 2, 5), key=pages, value=pages, block_table=table)


CACHE = torch.zeros(2, 1, 4, 4)


def decode(lengths: Tensor, **changes: Any) -> Tensor:
    new = torch.ones(2, 1, 1, 4)
    caches = {"k_cache": CACHE, "v_cache": CACHE, "k_new": new, "v_new": new}
    return fastattn.attention_with_kv_cache(new, cache_seqlens=lengths, **(caches | changes))


@pytest.mark.parametrize(
    ("call", "values", "message"),
    [
        (varlen, ints(0, 4, 2), "^cu_seqlens_k: expected offsets that do not decrease"),
        (varlen, ints(0, 2, 6), "^cu_seqlens_k: expected at most 5 .* as the last offset, got 6"),
        (varlen, ints(-1, 2, 5), "^cu_seqlens_k: expected 0 or more as the first offset, got -1"),
        (
            varlen,
            ints(2, 1, 2),
            r"^cu_seqlens_k: expected offsets, which begin with 0, got \[2, 1, 2\]; for lengths pass",
        ),
        (varlen, ints(0, 1, 5), "^max_seqlen_k: expected at least 4, the longest sequence in cu_seqlens_k, got 3"),
        (paged, ints([0, -1], [-1, 0]), "^block_table: expected pages from 0 to 1, got -1 as page 0 of sequence 1"),
        (decode, ints(3, 4), "^cache_seqlens: expected at most 3.* got 4 for sequence 1"),
        (decode, ints(-1, 3), "^cache_seqlens: expected lengths of at least 0, got -1"),
        (lambda table: decode(ints(1, 3), block_table=table), ints([0], [2]), "^block_table: .* got 2 as page 0"),
        (
            lambda table: decode(ints(1, 3), block_table=table, k_cache=CACHE[:1], v_cache=CACHE[:1]),
            ints([0], [2]),
            "^block_table: expected 0, the only one, got 2 as page 0",
        ),
        (
            lambda table: decode(ints(1, 3), block_table=table, k_cache=CACHE[:0], v_cache=CACHE[:0]),
            ints([0], [2]),
            "^block_table: expected no pages, as there are none, got 0 as page 0",
        ),
        (
            lambda lengths: decode(lengths, k_cache=CACHE[:, :, :0], v_cache=CACHE[:, :, :0]),
            ints(0, 0),
            "^k_cache: expected a capacity of at least 1, the tokens of k_new, got 0",
        ),
        (
            lambda offsets: varlen(offsets, **dict.fromkeys(("query", "key", "value"), torch.ones(1, 5, 4))),
            ints(0, 2, 5),
            r"^cu_seqlens_q: .* got 5; if heads come before rows, pass query\.transpose\(0, 1\) and so on",
        ),
    ],
    ids=[
        "order",
        "past the end",
        "before the first row",
        "lengths",
        "longest",
        "table of prompts",
        "capacity",
        "negative",
        "table of a cache",
        "table of a cache of one page",
        "table of a cache without pages",
        "no room",
        "heads before rows",
    ],
)
def test_wrong_places_in_cpu_memory_raise(call: Any, values: Tensor, message: str) -> None:
    """The check needs no request, and leaves the cache as it was."""
    with pytest.raises(fastattn.InputError, match=message):
        call(values)
    assert not CACHE.any()


@pytest.mark.parametrize(
    ("offsets", "message"), [(ints(0, 2, 4), "5 .* as the last"), (ints(1, 2, 5), "0 as the first")]
)
def test_rows_in_no_sequence_are_refused_on_request_alone(
    offsets: Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert varlen(offsets).shape == (5, 1, 4)
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(fastattn.InputError, match=f"^cu_seqlens_k: expected {message}"):
        varlen(offsets)


def test_what_only_records_or_stands_for_tensors_is_not_read() -> None:
    x, good = torch.ones(5, 1, 4), ints(0, 2, 5)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert varlen(mode.from_tensor(good), query=fake, key=fake, value=fake).shape == x.shape
    graph = make_fx(lambda offsets: varlen(offsets, query=x, key=x, value=x))(good)
    assert torch.equal(graph(good), varlen(good))
    mapped = torch.func.vmap(lambda offsets: varlen(offsets, query=x, key=x, value=x))(torch.stack([good, good]))
    assert torch.equal(mapped, torch.stack([varlen(good)] * 2))
