"""Tests KVCache: generation step by step equals attention over all tokens, whatever happens to the cache in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fastattn
from by_hand import normal
from fastattn import InputError, reference
from fastattn.cache.contiguous import KVCache
from fastattn.cache.storage import LayerStorage
from fastattn.errors import CacheFull

LAYERS, BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 3, 4, 2, 16, 8
TOTAL = 12


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def cache_of(**changes: Any) -> KVCache:
    usual: dict[str, Any] = {
        "num_layers": LAYERS,
        "batch": BATCH,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "value_dim": VALUE_DIM,
        "capacity": 4,
        "dtype": torch.float64,
    }
    return KVCache(**{**usual, **changes})


def tokens(layer: int, total: int = TOTAL) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layer's query, key and value of ``total`` tokens."""
    return (
        normal(10 * layer + 1, BATCH, HEADS, TOTAL, DIM)[:, :, :total],
        normal(10 * layer + 2, BATCH, KV_HEADS, TOTAL, DIM)[:, :, :total],
        normal(10 * layer + 3, BATCH, KV_HEADS, TOTAL, VALUE_DIM)[:, :, :total],
    )


def feed(cache: KVCache, begin: int, end: int, **options: Any) -> list[Any]:
    """Passes tokens ``begin`` to ``end`` through every layer, and returns each layer's output."""
    return [
        cache.attend(layer, *(t[:, :, begin:end] for t in tokens(layer)), **options)
        for layer in range(cache.num_layers)
    ]


def whole(layer: int, total: int = TOTAL, **options: Any) -> Any:
    return fastattn.attention(*tokens(layer, total), causal=True, **options)


def state(cache: KVCache) -> list[Tensor]:
    parts = [cache.arguments(layer) for layer in range(cache.num_layers)]
    return [t.clone() for part in parts for t in part.values() if t is not None]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("chunks", [(1,) * TOTAL, (5, 1, 1, 5), (TOTAL,)], ids=["tokens", "chunks", "prompt"])
@pytest.mark.parametrize("capacity", [1, 4, 64])
def test_generation_is_attention_over_all(capacity: int, chunks: tuple[int, ...]) -> None:
    cache, begin = cache_of(capacity=capacity), 0
    outputs: list[list[Tensor]] = []
    for chunk in chunks:
        outputs.append(feed(cache, begin, begin + chunk, window=(6, 0)))
        begin += chunk
    for layer in range(LAYERS):
        out = torch.cat([step[layer] for step in outputs], dim=2)
        torch.testing.assert_close(out, whole(layer, window=(6, 0)))
    assert cache.lengths() == [TOTAL] * BATCH
    assert cache.capacity >= TOTAL


def test_options_and_lse_go_through() -> None:
    cache = cache_of()
    angle = torch.arange(TOTAL)[:, None] * torch.logspace(0, -1, DIM // 2)
    options: dict[str, Any] = {"sinks": normal(5, HEADS), "softcap": 3.0}
    cos, sin = angle.cos().double(), angle.sin().double()
    out, lse = cache.attend(0, *tokens(0), rotary_cos=cos, rotary_sin=sin, return_lse=True, **options)
    query, key, value = tokens(0)
    query, key = (reference.rotary(t, cos[None], sin[None]) for t in (query, key))
    expected = fastattn.attention(query, key, value, causal=True, return_lse=True, **options)
    torch.testing.assert_close((out, lse), tuple(expected))


def test_growth_doubles_and_keeps_what_was_there() -> None:
    cache = cache_of(capacity=4)
    feed(cache, 0, 4)
    assert cache.capacity == 4
    before = state(cache)
    feed(cache, 4, 5)
    assert cache.capacity == 8
    for old, new in zip(before, state(cache), strict=True):
        if old.dim() == 4:
            assert torch.equal(new[:, :, :4], old)
    feed(cache, 5, 5)
    assert cache.capacity == 8
    cache.reserve(11)
    assert cache.capacity == 11
    cache.reserve(3)
    assert cache.capacity == 11
    torch.testing.assert_close(feed(cache, 5, TOTAL)[1], whole(1)[:, :, 5:])


@pytest.mark.parametrize("rows", [5, 16])
def test_heads_behind_rows_are_seen(rows: int) -> None:
    """The layout is [B, S, H, D] with 8 heads. The number of rows is a multiple of 8, or is not."""
    query = torch.randn(2, rows, 8, 16)
    with pytest.raises(InputError, match=r"pass (query|k_new)\.transpose\(1, 2\)"):
        KVCache(1, 2, 8, 16).attend(0, query, query, query)


def test_a_small_maximum_needs_no_capacity_beside_it() -> None:
    assert cache_of(capacity=None, max_capacity=5).capacity == 5
    assert cache_of(capacity=None).capacity == 256


def test_growth_ends_at_the_maximum_and_leaves_the_cache_as_it_was() -> None:
    cache = cache_of(capacity=3, max_capacity=5)
    feed(cache, 0, 4)
    assert cache.capacity == 5
    before = state(cache)
    with pytest.raises(CacheFull, match="no room for 6 tokens per sequence, as max_capacity is 5; make"):
        feed(cache, 4, 6)
    assert_same(state(cache), before)
    torch.testing.assert_close(feed(cache, 4, 5)[0], whole(0, 5)[:, :, 4:])


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "v_new's dtype": ({"v_new": torch.zeros(BATCH, KV_HEADS, 1, VALUE_DIM)}, InputError),
    "query's head dim": ({"query": normal(1, BATCH, HEADS, 1, 8)}, InputError),
    "softcap": ({"softcap": -1.0}, InputError),
    "rotary_sin is missing": ({"rotary_cos": torch.ones(TOTAL, 2)}, InputError),
    "gradients": ({"k_new": normal(1, BATCH, KV_HEADS, 1, DIM).requires_grad_()}, InputError),
    "block_table": ({"block_table": torch.zeros(BATCH, 1).int()}, TypeError),
    "num_splits' type": ({"num_splits": "2"}, TypeError),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
def test_a_refused_append_leaves_the_cache_as_it_was(quantized: bool, wrong: str) -> None:
    """This holds also where the append would have made the cache grow."""
    cache = cache_of(quantized=quantized)
    feed(cache, 0, 4)
    before, nbytes = state(cache), cache.nbytes
    query, key, value = (t[:, :, 4:5] for t in tokens(0))
    arguments, kind = REFUSED[wrong]
    with pytest.raises(kind):
        cache.attend(0, **{"query": query, "k_new": key, "v_new": value, **arguments})
    assert_same(state(cache), before)
    assert (cache.capacity, cache.nbytes, cache.lengths()) == (4, nbytes, [4] * BATCH)
    out = feed(cache, 4, 5)[0]
    if not quantized:
        torch.testing.assert_close(out, whole(0, 5)[:, :, 4:])


def test_an_explanation_changes_nothing() -> None:
    cache = cache_of()
    feed(cache, 0, 4)
    before, nbytes = state(cache), cache.nbytes
    query, key, value = (t[:, :, 4:5] for t in tokens(0))
    assert fastattn.explain(cache.attend, 0, query, key, value).backend == "torch"
    assert fastattn.explain(cache.append, 0, key, value).backend == "torch"
    assert_same(state(cache), before)
    assert (cache.capacity, cache.nbytes) == (4, nbytes)
    torch.testing.assert_close(feed(cache, 4, 5)[0], whole(0, 5)[:, :, 4:])


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_growth_that_runs_out_of_memory_changes_nothing(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    feed(cache, 0, 4)
    before, nbytes = state(cache), cache.nbytes
    allocate, calls = LayerStorage.allocate, iter(range(LAYERS))

    def failing(*arguments: Any) -> LayerStorage:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return allocate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStorage, "allocate", failing)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(64)
    assert_same(state(cache), before)
    assert (cache.capacity, cache.nbytes) == (4, nbytes)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["ints", "tensor"])
def test_a_ragged_prompt_is_padded_and_truncated(as_tensor: bool) -> None:
    """Tokens after the truncation overwrite the padding, at each sequence's own position."""
    lengths = [2, 5, 3]
    cache = cache_of(capacity=16)
    prompt = feed(cache, 0, 5)
    cache.truncate(torch.tensor(lengths) if as_tensor else lengths)
    assert cache.lengths() == lengths
    step = feed(cache, 6, 7)
    for layer in range(LAYERS):
        for b, length in enumerate(lengths):
            own = [*range(length), 6]
            query, key, value = (t[b : b + 1, :, own] for t in tokens(layer))
            expected: Any = fastattn.attention(query, key, value, causal=True)
            torch.testing.assert_close(prompt[layer][b, :, :length], expected[0, :, :length])
            torch.testing.assert_close(step[layer][b], expected[0, :, length:])
    assert cache.lengths() == [length + 1 for length in lengths]


def test_truncation_never_lengthens_and_makes_room() -> None:
    cache = cache_of(capacity=8)
    feed(cache, 0, 8)
    cache.truncate(99)
    assert cache.lengths() == [8] * BATCH
    cache.truncate(6)
    feed(cache, 6, 8)
    assert cache.capacity == 8
    cache.truncate([0, 3, 8])
    assert cache.lengths() == [0, 3, 8]


@pytest.mark.parametrize("length", [2**31, 2**32 + 1, 2**40])
def test_truncation_to_more_than_int32_holds_keeps_everything(length: int) -> None:
    cache = cache_of(capacity=8)
    feed(cache, 0, 8)
    cache.truncate(length)
    cache.truncate(torch.full((BATCH,), length))
    assert cache.lengths() == [8] * BATCH


def test_layers_that_never_attend_are_told() -> None:
    cache = cache_of(num_layers=3)

    def step(begin: int) -> None:
        for layer in range(2):
            cache.attend(layer, *(t[:, :, begin : begin + 1] for t in tokens(layer)))

    step(0)
    with pytest.warns(RuntimeWarning, match=r"layers \[2\] of num_layers=3 have not stored") as found:
        step(1)
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.truncate(cache.lengths())  # as the warning advises
        feed(cache, 0, 2)
        feed(cache, 2, 3)
        cache.reset()
        feed(cache, 0, 1)
    assert cache.lengths() == [1] * BATCH


def test_reset_forgets_everything() -> None:
    cache = cache_of(capacity=8)
    feed(cache, 3, 11)
    capacity = cache.capacity
    cache.reset()
    assert cache.lengths() == [0] * BATCH
    torch.testing.assert_close(feed(cache, 0, 8)[1], whole(1, 8))
    assert cache.capacity == capacity


def test_formats_have_names() -> None:
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        assert cache_of(quantized=name).arguments(0)["k_cache"].dtype == dtype


@pytest.mark.parametrize("quantized", [False, True])
def test_reorder_moves_whole_sequences(quantized: bool) -> None:
    cache, expected = cache_of(quantized=quantized), cache_of(quantized=quantized)
    order = torch.tensor([2, 2, 0])
    feed(cache, 0, 5)
    feed(expected, 0, 5)
    cache.truncate([5, 4, 3])
    cache.reorder(order)
    assert cache.lengths() == [3, 3, 5]
    for layer in range(LAYERS):
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            actual, moved = cache.arguments(layer)[name], expected.arguments(layer)[name]
            assert (actual is None) == (not quantized and name.endswith("scale"))
            if actual is not None:
                assert torch.equal(actual, moved[order])


def test_reorder_refuses_sequences_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"sequences: expected indices from 0 to 2, got \[0, 5, 1\]"):
        cache_of().reorder(torch.tensor([0, 5, 1]))


def test_a_range_of_one_is_said_in_words() -> None:
    cache = fastattn.KVCache(1, 1, 2, 16)
    with pytest.raises(InputError, match=r"sequences: expected 0, the only one, got \[1\]"):
        cache.reorder(torch.tensor([1]))
    with pytest.raises(InputError, match="layer: expected 0, the only one, got 1"):
        cache.arguments(1)


@pytest.mark.parametrize("lengths", [numpy.array([3, 1, 2]), [numpy.int64(3), 1, numpy.int32(2)], iter((3, 1, 2))])
def test_lengths_may_be_numpys(lengths: Any) -> None:
    cache = cache_of()
    feed(cache, 0, 4)
    cache.truncate(lengths)
    assert cache.lengths() == [3, 1, 2]
    cache.truncate(numpy.uint8(1))
    assert cache.lengths() == [1, 1, 1]


def test_append_is_attend_without_a_query() -> None:
    cache = cache_of(quantized=True)
    other = cache_of(quantized=True)
    feed(other, 0, 5)
    for layer in range(LAYERS):
        _, key, value = tokens(layer, 5)
        cache.append(layer, key, value)
    assert_same(state(cache), state(other))


def test_quantized_caches_lose_what_int8_loses_and_grow_too() -> None:
    exact, rounded = cache_of(), cache_of(quantized=True)
    for begin in range(TOTAL):
        a, b = feed(exact, begin, begin + 1)[1], feed(rounded, begin, begin + 1)[1]
        assert 0 < (a - b).abs().max().item() < 0.1
    assert rounded.nbytes < exact.nbytes / 3
    stored, key = rounded.arguments(1), tokens(1)[1]
    back = stored["k_cache"][:, :, :TOTAL].double() * stored["k_scale"][:, :, :TOTAL, None]
    assert bool(((back - key).abs() <= key.abs().amax(-1, keepdim=True) / 127 * 0.5001).all())


def test_rows_lie_where_vector_loads_want_them() -> None:
    for quantized, dim in ((True, 24), (False, 20), (True, 8)):
        cache = cache_of(head_dim=dim, value_dim=None, dtype=torch.float16, quantized=quantized)
        stored: Tensor = cache.arguments(0)["k_cache"]
        assert stored.shape[-1] == dim
        assert all(stride * stored.element_size() % 16 == 0 for stride in stored.stride()[:3])


def test_it_works_across_inference_mode() -> None:
    with torch.inference_mode():
        cache = cache_of(capacity=2)
        feed(cache, 0, 5)
    with torch.no_grad():
        out = feed(cache, 5, 6)[0]
    torch.testing.assert_close(out, whole(0, 6)[:, :, 5:])


def test_a_step_compiles_and_still_grows() -> None:
    cache = cache_of(num_layers=1, capacity=2)
    step = torch.compile(lambda *new: cache.attend(0, *new), fullgraph=True, backend="aot_eager")
    for begin in range(3):
        out = step(*(t[:, :, begin : begin + 1] for t in tokens(0)))
        torch.testing.assert_close(out, whole(0, begin + 1)[:, :, begin:])
    assert cache.capacity == 4
    assert cache.arguments(0)["cache_seqlens"].tolist() == [3] * BATCH


def test_replays_are_noted() -> None:
    cache = cache_of(capacity=8)
    feed(cache, 0, 3)
    cache.cache_seqlens.fill_(7)  # stands for a replay, which changes it on the device
    cache.note_replayed(4)
    with pytest.raises(InputError, match=r"num_new: expected at most 1, for which the captured graph had room, got 2"):
        cache.note_replayed(2)
    feed(cache, 7, 9)
    assert cache.capacity == 16


def test_repr_says_what_it_holds() -> None:
    text = repr(cache_of(quantized=True))
    for words in ("num_layers=2", "batch=3", "capacity=4", "kv_heads=2", "head_dim=16", "value_dim=8", "int8 on cpu"):
        assert words in text


def attend(**changes: Any) -> dict[str, Any]:
    query, key, value = (t[:, :, :1] for t in tokens(0))
    return {"layer": 0, "query": query, "k_new": key, "v_new": value, **changes}


C = cache_of()
# name: (function, arguments, words of the message: argument, expected, came)
Misuse = dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]]
INPUT_ERRORS: Misuse = {
    "num_layers": (cache_of, {"num_layers": 0}, ("num_layers", "at least 1", "0")),
    "batch": (cache_of, {"batch": -1}, ("batch", "at least 0", "-1")),
    "head_dim": (cache_of, {"head_dim": 0}, ("head_dim", "at least 1", "0")),
    "capacity": (cache_of, {"capacity": 0}, ("capacity", "at least 1", "0")),
    "max_capacity": (cache_of, {"max_capacity": 3}, ("capacity", "at most max_capacity=3", "4")),
    "max_capacity of 0": (cache_of, {"max_capacity": 0}, ("max_capacity", "at least 1", "0")),
    "dtype": (cache_of, {"dtype": torch.int8}, ("dtype", "float16", "int8")),
    "device": (cache_of, {"device": "gpu"}, ("device: expected", "'gpu'")),
    "another dtype": (
        cache_of(dtype=torch.float16).attend,
        attend(),
        ("query", "cache's dtype, torch.float16", "torch.float64", "dtype=torch.float64"),
    ),
    "quantized to what": (cache_of, {"quantized": "int4"}, ("quantized", "'int8', 'fp8'", "'int4'")),
    "quantized dtype": (cache_of, {"quantized": torch.half}, ("quantized", "'int8', 'fp8'", "float16")),
    "layer": (C.attend, attend(layer=2), ("layer", "0 to 1", "2")),
    "query batch": (C.attend, attend(query=torch.zeros(2, 4, 1, 16)), ("query", "3 as first", "[2, 4, 1, 16]")),
    "KV heads": (
        C.attend,
        attend(k_new=torch.zeros(3, 4, 1, 16), v_new=torch.zeros(3, 4, 1, 8)),
        ("k_new", "[3, 2, 1, 16]", "[3, 4, 1, 16]; the cache was made with kv_heads=2, head_dim=16"),
    ),
    "query head dim": (
        C.attend,
        attend(query=torch.zeros(3, 4, 1, 8)),
        ("query", "the cache's head_dim 16", "[3, 4, 1, 8]"),
    ),
    "k_new rank": (C.attend, attend(k_new=torch.zeros(3, 2, 16)), ("k_new", "[B, Hkv, S_new, D]", "[3, 2, 16]")),
    "v_new rows": (C.attend, attend(v_new=torch.zeros(3, 2, 2, 8)), ("v_new", "[3, 2, 1, 8]", "[3, 2, 2, 8]")),
    "truncate count": (C.truncate, {"lengths": [1, 2]}, ("lengths", "3 ints", "[1, 2]")),
    "truncate negative": (C.truncate, {"lengths": [1, 2, -1]}, ("lengths[2]: ", "at least 0", "-1")),
    "truncate all to a negative": (C.truncate, {"lengths": -1}, ("lengths: ", "at least 0", "-1")),
    "truncate shape": (C.truncate, {"lengths": torch.zeros(2).int()}, ("lengths", "[3]", "[2]")),
    "truncate dtype": (C.truncate, {"lengths": torch.zeros(3)}, ("lengths", "int32", "float32")),
    "replayed": (C.note_replayed, {"num_new": -1}, ("num_new", "at least 0", "-1")),
    "reorder shape": (C.reorder, {"sequences": torch.zeros(2).int()}, ("sequences", "[3]", "[2]")),
    "reorder dtype": (C.reorder, {"sequences": torch.zeros(3)}, ("sequences", "int64", "float32")),
}
TYPE_ERRORS: Misuse = {
    "kv_heads": (cache_of, {"kv_heads": 2.0}, ("kv_heads", "int", "float")),
    "value_dim": (cache_of, {"value_dim": "8"}, ("value_dim", "int", "str")),
    "dtype type": (cache_of, {"dtype": "half"}, ("dtype", "torch.dtype", "str 'half'; pass torch.float16")),
    "quantized": (cache_of, {"quantized": None}, ("quantized", "bool", "'int8', 'fp8'", "NoneType")),
    "layer type": (C.attend, attend(layer="0"), ("layer", "int", "str")),
    "query type": (C.attend, attend(query=None), ("query", "torch.Tensor", "NoneType")),
    "k_new type": (C.attend, attend(k_new=None), ("k_new", "torch.Tensor", "NoneType")),
    "truncate type": (C.truncate, {"lengths": "all"}, ("lengths: ", "a list of ints or a tensor", "str 'all'")),
    "truncate to fractions": (C.truncate, {"lengths": numpy.zeros(3)}, ("lengths[0]: ", "an int", "0.0")),
    "truncate by a list of tensors": (
        C.truncate,
        {"lengths": [torch.tensor(1)] * 3},
        ("lengths[0]: ", "an int", "pass lengths[0].item()"),
    ),
    "batch_size": (cache_of, {"batch_size": 2}, ("KVCache() got", "'batch_size'; it is called 'batch' here")),
    "num_heads": (cache_of, {"num_heads": 2}, ("'num_heads'", "keys and values as kv_heads")),
    "max_seq_len": (cache_of, {"max_seq_len": 9}, ("'max_seq_len'", "max_capacity is how many tokens fit at most")),
    "kv_cache_dtype": (cache_of, {"kv_cache_dtype": "fp8"}, ("it is called 'quantized' here",)),
    "reserve": (C.reserve, {"capacity": 1.5}, ("capacity", "int", "float")),
    "reorder type": (C.reorder, {"sequences": [0, 1, 2]}, ("sequences", "torch.Tensor", "list")),
}


@pytest.mark.parametrize("case", INPUT_ERRORS | TYPE_ERRORS)
def test_bad_input_is_refused(case: str) -> None:
    function, arguments, words = (INPUT_ERRORS | TYPE_ERRORS)[case]
    kind = InputError if case in INPUT_ERRORS else TypeError
    before = state(C)
    with pytest.raises(kind) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert_same(state(C), before)
