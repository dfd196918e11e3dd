"""Tests PagedStep and PagedChunk: when their tokens count, when they are refused, and that refusals change nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from by_hand import normal
from fastattn import InputError
from fastattn.cache.paged import PagedChunk, PagedKVCache, PagedStep
from fastattn.cache.storage import LayerStorage
from fastattn.errors import CacheFull

LAYERS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 16, 8
PAGES, PAGE_SIZE = 8, 4

each_form = pytest.mark.parametrize("form", ["step", "chunk"])


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def cache_of(**changes: Any) -> PagedKVCache:
    usual: dict[str, Any] = {"page_size": PAGE_SIZE, "value_dim": VALUE_DIM, "dtype": torch.float64}
    return PagedKVCache(LAYERS, PAGES, KV_HEADS, DIM, **{**usual, **changes})


def new_tokens(form: str, batch: int, num_new: int, seed: int = 1) -> dict[str, Tensor]:
    """Returns query, key and value of ``num_new`` tokens for each of ``batch`` sequences."""
    shapes = {"query": (HEADS, DIM), "k_new": (KV_HEADS, DIM), "v_new": (KV_HEADS, VALUE_DIM)}
    if form == "step":
        return {
            name: normal(seed + i, batch, heads, num_new, dim) for i, (name, (heads, dim)) in enumerate(shapes.items())
        }
    return {name: normal(seed + i, batch * num_new, *shape) for i, (name, shape) in enumerate(shapes.items())}


def begin(cache: PagedKVCache, form: str, sequences: list[int], num_new: int) -> PagedStep | PagedChunk:
    if form == "step":
        return cache.step(sequences, num_new)
    return cache.chunk(sequences, [num_new] * len(sequences))


def fill(cache: PagedKVCache, form: str, sequences: list[int], num_new: int, seed: int = 1) -> PagedStep | PagedChunk:
    """Runs a step through all layers."""
    step = begin(cache, form, sequences, num_new)
    for layer in range(LAYERS):
        step.attend(layer, **new_tokens(form, len(sequences), num_new, seed))
    return step


def state(cache: PagedKVCache) -> Any:
    """Returns everything that a refusal must not change."""
    pool = cache._pool
    tensors = [tensor.tolist() for layer in cache._layers for tensor in layer.tensors()]
    sequences = {name: (cache.length(name), cache.pages(name)) for name in cache.sequences}
    return cache.num_free_pages, sequences, pool.references[:], pool.free_pages[:], cache.nbytes, tensors


CHANGES: dict[str, tuple[Callable[[PagedKVCache, int], object], str]] = {
    "free": (lambda cache, s: cache.free(s), "sequence 0 was freed"),
    "reset": (lambda cache, s: cache.reset(), "sequence 0 was freed"),
    "truncate": (lambda cache, s: cache.truncate(s, 1), "sequence 0 was truncated"),
    "truncate to what it has": (lambda cache, s: cache.truncate(s, cache.length(s)), "sequence 0 was truncated"),
    "fork": (lambda cache, s: cache.fork(s), "sequence 0 was forked"),
    "step": (lambda cache, s: cache.step([s], 1), "sequence 0 has had another step"),
    "chunk": (lambda cache, s: cache.chunk([s], [0]), "sequence 0 has had another step"),
}


@each_form
@pytest.mark.parametrize("has_begun", ["not begun", "half done", "done"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_refused_once_one_of_its_sequences_has_changed(change: str, has_begun: str, form: str) -> None:
    """Otherwise it would write to pages that now belong to a later sequence."""
    cache = cache_of()
    a, b = cache.add(), cache.add()
    fill(cache, "step", [a, b], 3)
    old = begin(cache, form, [a, b], 2)
    new = new_tokens(form, 2, 2)
    for layer in range({"not begun": 0, "half done": 1, "done": LAYERS}[has_begun]):
        old.attend(layer, **new)
    assert cache.length(a) == (5 if has_begun == "done" else 3)
    function, reason = CHANGES[change]
    kept = function(cache, a)
    after = cache.add()
    fill(cache, "step", [after], PAGE_SIZE * cache.num_free_pages, seed=9)  # takes all pages that were freed
    before = state(cache)
    with pytest.raises(InputError, match=f"can store no more tokens, because {reason}"):
        old.attend(0, **new)
    with pytest.raises(InputError, match=reason):
        old.commit()
    if isinstance(old, PagedChunk):
        with pytest.raises(InputError, match=reason):
            old.store(0, new["k_new"], new["v_new"])
    assert state(cache) == before
    del kept


@each_form
def test_steps_of_other_sequences_may_come_in_between(form: str) -> None:
    cache, expected = cache_of(), cache_of()
    for each in (cache, expected):
        assert [each.add(), each.add()] == [0, 1]
    steps = [begin(cache, form, [0], 3), begin(cache, form, [1], 2)]
    for layer in range(LAYERS):
        for step, num_new in zip(steps, (3, 2), strict=True):
            step.attend(layer, **new_tokens(form, 1, num_new))
        cache.free(cache.add())
    fill(expected, form, [0], 3)
    fill(expected, form, [1], 2)
    assert state(cache)[1:] == state(expected)[1:]
    assert (cache.length(0), cache.length(1)) == (3, 2)


@each_form
def test_tokens_count_once_every_layer_has_stored_them(form: str) -> None:
    """Layers may store them in any order, and repeatedly."""
    cache = cache_of()
    a = cache.add()
    step = begin(cache, form, [a], 5)
    new = new_tokens(form, 1, 5)
    for layer in (1, 1):
        assert (cache.length(a), step.lengths(), cache.pages(a), cache.num_free_pages) == (0, [0], [], PAGES - 2)
        first = step.attend(layer, **new)
    assert cache.length(a) == 0
    step.attend(0, **new)
    assert (cache.length(a), step.lengths(), cache.num_free_pages) == (5, [5], PAGES - 2)
    before = state(cache)
    torch.testing.assert_close(step.attend(1, **new), first, rtol=0, atol=0)
    assert state(cache) == before


@each_form
@pytest.mark.parametrize("how", ["cancelled", "forgotten", "overtaken"])
def test_an_abandoned_step_has_never_been(how: str, form: str) -> None:
    cache = cache_of()
    a, b = cache.add(), cache.add()
    fill(cache, "step", [a, b], 3)
    before = state(cache)
    step = begin(cache, form, [a, b], 6)
    step.attend(0, **new_tokens(form, 2, 6))
    assert cache.num_free_pages == before[0] - 4
    if how == "cancelled":
        step.cancel()
        with pytest.raises(InputError, match="can store no more tokens, because it was cancelled"):
            step.attend(1, **new_tokens(form, 2, 6))
    elif how == "forgotten":
        del step
        gc.collect()
    else:
        cache.step([b], 0).commit()
    assert state(cache)[:2] == before[:2]
    fill(cache, form, [b, a], 6)
    assert (cache.length(a), cache.length(b)) == (9, 9)


def test_a_retry_may_take_the_pages_of_the_step_that_failed() -> None:
    cache = cache_of()
    a = cache.add()
    step = cache.step([a], PAGES * PAGE_SIZE)
    assert cache.num_free_pages == 0
    again = cache.step([a], PAGES * PAGE_SIZE - 1)
    assert sorted(again.block_table[0].tolist()) == list(range(PAGES))
    with pytest.raises(InputError, match="sequence 0 has had another step"):
        step.commit()
    with pytest.raises(CacheFull):
        cache.step([a], PAGES * PAGE_SIZE + 1)
    again.commit()  # the refused step has not ended it
    assert cache.length(a) == PAGES * PAGE_SIZE - 1


def test_cancelling_what_counts_has_no_effect() -> None:
    cache = cache_of()
    a = cache.add()
    step = fill(cache, "step", [a], 3)
    step.cancel()
    assert cache.length(a) == 3
    step.attend(0, **new_tokens("step", 1, 3))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "softcap": ({"softcap": -1.0}, InputError),
    "window": ({"window": (1, 2, 3)}, InputError),
    "sinks": ({"sinks": torch.zeros(HEADS + 1)}, InputError),
    "rotary_sin is missing": ({"rotary_cos": torch.ones(32, 2)}, InputError),
    "batch_invariant": ({"batch_invariant": 1}, TypeError),
    "num_splits": ({"num_splits": -1}, InputError),
    "causal": ({"causal": None}, TypeError),
    "block_table": ({"block_table": torch.zeros(1, 1).int()}, TypeError),
    "layer": ({"layer": LAYERS}, InputError),
    "v_new is missing": ({"v_new": None}, TypeError),
    "v_new's dtype": ({"v_new": "half"}, InputError),
    "query's dtype": ({"query": "half"}, InputError),
    "v_new's length": ({"v_new": "longer"}, InputError),
    "k_new's length": ({"k_new": "longer"}, InputError),
    "k_new needs gradients": ({"k_new": "gradients"}, InputError),
}


@each_form
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_a_refused_call_changes_nothing(wrong: str, when: str, form: str) -> None:
    """The call is refused before a first call, and after it, when the tokens that it would overwrite count."""
    cache = cache_of()
    a, b = cache.add(), cache.add()
    step = fill(cache, form, [a, b], 3) if when == "after" else begin(cache, form, [a, b], 3)
    changes, kind = REFUSED[wrong]
    arguments: dict[str, Any] = {"layer": 0, **new_tokens(form, 2, 3, seed=5)}
    token_dim = 2 if form == "step" else 0
    for name, change in changes.items():
        changed = {
            "half": lambda tensor: tensor.half(),
            "longer": lambda tensor: torch.cat([tensor, tensor], dim=token_dim),
            "gradients": lambda tensor: tensor.requires_grad_(),
        }
        arguments[name] = changed[change](arguments[name]) if isinstance(change, str) else change
    before = state(cache)
    with pytest.raises(kind):
        step.attend(**arguments)
    assert state(cache) == before
    step.commit()
    assert (cache.length(a), cache.length(b)) == (3, 3)


@each_form
def test_an_explanation_changes_nothing(form: str) -> None:
    cache = cache_of()
    a = cache.add()
    fill(cache, form, [a], 3)
    step = begin(cache, form, [a], 3)
    before = state(cache)
    for layer in range(LAYERS):
        assert fastattn.explain(step.attend, layer, **new_tokens(form, 1, 3)).backend == "torch"
    assert state(cache) == before
    assert cache.length(a) == 3


@each_form
@pytest.mark.parametrize("where", ["tables", "copies"])
def test_a_step_that_finds_no_memory_changes_nothing(where: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    a = cache.add()
    fill(cache, form, [a], 6)
    b = cache.fork(a)
    waiting = begin(cache, form, [a], 1)
    before = state(cache)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        if where == "tables":
            patch.setattr(PagedKVCache, "_to_device", fail)
        else:
            patch.setattr(LayerStorage, "copy_blocks", fail)
        cache.fork(b)  # so its half-full page must be copied
        before = state(cache)
        with pytest.raises(torch.OutOfMemoryError):
            begin(cache, form, [b, a], 3)
    assert state(cache) == before
    for layer in range(LAYERS):
        waiting.attend(layer, **new_tokens(form, 1, 1))
    assert cache.length(a) == 7


def test_a_chunk_takes_one_query_for_each_of_its_tokens() -> None:
    cache = cache_of()
    chunk = cache.chunk([cache.add()], [5])
    new = new_tokens("chunk", 1, 5)
    for name, tensor in new.items():
        with pytest.raises(InputError, match=f"{name}: expected 5 new tokens, as the chunk was made for, got 4"):
            chunk.attend(0, **{**new, name: tensor[:4]})
    rows = {name: tensor.transpose(0, 1)[None] for name, tensor in new.items()}
    with pytest.raises(InputError, match="query: expected 5 new tokens, as the chunk was made for, got 6"):
        chunk.attend(0, **{**rows, "query": normal(1, 1, HEADS, 6, DIM)})
    with pytest.raises(InputError, match=r"k_new: expected 4 dimensions \[1, H, total_new, D\]"):
        chunk.attend(0, **{**rows, "k_new": new["k_new"]})
    with pytest.raises(InputError, match=r"v_new: expected shape \[1, H, total_new, D\] = \[1, 2, 5, 8\]"):
        chunk.attend(0, **{**rows, "v_new": rows["v_new"].expand(2, -1, -1, -1)})
    with pytest.raises(InputError, match=r"num_splits: expected 0 in a chunk, .*, got 2; leave it out"):
        chunk.attend(0, **new, num_splits=2)
    with pytest.raises(InputError, match="rotary_cos: expected at least 5 rows, one for each position, got 4"):
        chunk.attend(0, **new, rotary_cos=torch.ones(4, 2), rotary_sin=torch.zeros(4, 2))
    assert not cache.pools(0)[0].any()


@pytest.mark.slow
def test_compiled_steps_share_a_graph_whatever_their_lengths_and_pages() -> None:
    torch._dynamo.reset()
    cache, expected = cache_of(page_size=2), cache_of(page_size=2)
    sequences = [[each.add(), each.add()] for each in (cache, expected)]
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=graphs)
    def layers(step: PagedStep, query: Tensor, k_new: Tensor, v_new: Tensor) -> list[Tensor]:
        return [step.attend(layer, query, k_new, v_new) for layer in range(LAYERS)]

    for i in range(8):
        new = new_tokens("step", 2, 1, seed=10 * i)
        outs = layers(cache.step(sequences[0], 1), **new)
        step = expected.step(sequences[1], 1)
        for layer, out in enumerate(outs):
            torch.testing.assert_close(out, step.attend(layer, **new))
        assert cache.length(sequences[0][1]) == i + 1
    assert graphs.frame_count <= 3  # for tables of 1, 2 and any number of pages
