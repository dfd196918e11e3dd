"""Tests packed sequences over ranks: how they are divided, and that attention over them equals that of one process."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ranks
from fastattn import InputError, reference
from fastattn.distributed.blocks import PackedSpread
from fastattn.distributed.gathering import reads_little
from fastattn.distributed.packed import LAYOUTS, PackedLayout, arrange, deal
from fastattn.profiler.work import visible_pairs

STRATEGIES = ("ring", "allgather", "ulysses")
LENGTHS = (45, 3, 0, 17, 8, 30, 1, 9)  # the first is cut, some of the others too
ALL_KEYS, CAUSAL = (-1, -1), (-1, 0)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "sinks": (4,), "scale": 0.4},
    {"window": (7, 0), "softcap": 2.0},
    {"window": (5, 6), "alibi_slopes": (8, 4)},
    {"causal": True, "alibi_slopes": (4,), "dropout_p": 0.3, "dropout_seed": 99, "sinks": (4,)},
    {"dropout_p": 0.2, "dropout_seed": 2**60},
    {"key_ranges": 4, "sinks": (4,)},
    {"key_ranges": 1, "causal": True, "dropout_p": 0.3, "dropout_seed": 5},
]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def problem(lengths: tuple[int, ...] = LENGTHS, kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draws query, key and value, equal on every rank."""
    total = sum(lengths)
    shapes = (total, 4, 8), (total, kv_heads, 8), (total, kv_heads, 6)
    return [drawn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def in_one_process(whole: list[Tensor], lengths: tuple[int, ...] = LENGTHS, **options: Any) -> tuple[Tensor, ...]:
    offsets = offsets_of(lengths)
    return reference.attention_varlen(*whole, offsets, offsets, max(lengths), max(lengths), **options)


def with_tensors(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces shapes by tensors that need gradients, and a number of heads by ranges of keys."""

    def tensor(name: str, shape: Any) -> Any:
        if name == "key_ranges":
            lengths = torch.tensor(LENGTHS)
            num_keys = lengths.repeat_interleave(lengths)[:, None]
            cuts = (drawn(shape, sum(LENGTHS), 4, seed=8).sigmoid() * (num_keys + 1)).sort(-1).values
            return cuts.to(torch.int32).clamp(max=num_keys).to(torch.int32).unflatten(-1, (2, 2))
        return drawn(*shape, seed=7).abs().requires_grad_() if name in ("alibi_slopes", "sinks") else shape

    return {name: tensor(name, value) for name, value in options.items()}


# --- How sequences are divided ----------------------------------------------------------------------------------------


def drawn_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice((0, 1, 5, draw.randrange(40), draw.randrange(400))) for _ in range(draw.randrange(1, 30))]


@pytest.mark.parametrize("seed", range(30))
def test_each_row_is_on_one_rank(seed: int) -> None:
    lengths = drawn_lengths(seed)
    for layout, world_size, window in itertools.product(LAYOUTS, (1, 2, 5, 8), (ALL_KEYS, CAUSAL, (30, 4))):
        dealt = deal(lengths, world_size, layout, window)
        assert len(dealt) == world_size
        begins = offsets_of(tuple(lengths)).tolist()
        for parts in dealt:
            for part in parts:
                assert part.length > 0 and part.first % 4 == 0
                assert begins[part.document] + part.first == part.rows.start
                assert part.first + part.length <= lengths[part.document]
        rows = sorted(row for parts in dealt for part in parts for row in range(part.rows.start, part.rows.stop))
        assert rows == list(range(sum(lengths)))
        for parts in dealt:
            arranged, sources = arrange(parts, lengths)
            assert [part.rows.start for part in arranged] == [0, *(part.rows.stop for part in arranged[:-1])][
                : len(arranged)
            ]
            taken = [row for of in sources for row in range(of.start, of.stop)]
            expected = [begins[part.document] + part.first + i for part in arranged for i in range(part.length)]
            assert taken == expected
            is_whole = [part.length == lengths[part.document] for part in arranged]
            assert is_whole == sorted(is_whole)


@pytest.mark.parametrize("window", [ALL_KEYS, CAUSAL, (100, 0)], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_balanced_ranks_have_as_much_to_do(seed: int, window: tuple[int, int]) -> None:
    """The documents are packed as for training; in a second case, one is longer than all others together."""
    draw = random.Random(seed)
    lengths = [int(draw.paretovariate(1.1) * 50) % 6000 + 8 for _ in range(100)]
    for of_one, world_size in itertools.product(([], [2 * sum(lengths)]), (2, 4, 8)):
        dealt = deal(lengths + of_one, world_size, "balanced", window)
        rows = [sum(part.length for part in parts) for parts in dealt]
        documents = lengths + of_one
        work = [
            sum(visible_pairs(part.length, documents[part.document], *window, offset=part.first) for part in parts)
            for parts in dealt
        ]
        fair = sum(work) / world_size
        assert max(work) <= 1.2 * fair
        assert max(rows) <= 1.15 * sum(documents) / world_size + 16


@pytest.mark.parametrize(
    ("length", "count", "world_size"), [(7, 8, 8), (40, 64, 64), (50, 300, 64), (3, 5, 64), (9, 9, 8)]
)
def test_short_documents_on_many_ranks_are_as_many_rows(length: int, count: int, world_size: int) -> None:
    rows = [sum(part.length for part in parts) for parts in deal([length] * count, world_size, "balanced", CAUSAL)]
    assert max(rows) <= max(length, -(-length * count // world_size) + 3)


def test_documents_that_fit_stay_whole() -> None:
    dealt = deal([50] * 8, 8, "balanced", CAUSAL)
    assert all(len(parts) == 1 and parts[0].length == 50 for parts in dealt)


def test_a_layout_can_be_pickled_after_its_first_use() -> None:
    parts = tuple(deal([50] * 4, 2, "balanced", CAUSAL))
    layout = PackedLayout((50,) * 4, parts)
    spread = layout.spread(CAUSAL)
    reading = spread.reading(0, 1)
    assert pickle.loads(pickle.dumps(layout)).parts == parts
    assert pickle.loads(pickle.dumps(spread)).reading(0, 1) == reading


def test_what_lies_on_few_ranks_is_little_to_read() -> None:
    def little(lengths: list[int], world_size: int, layout: str, window: tuple[int, int]) -> bool:
        parts = tuple(map(tuple, deal(lengths, world_size, layout, window)))
        num_rows = max(sum(part.length for part in of_rank) for of_rank in parts)
        return reads_little(PackedSpread(parts, num_rows, tuple(lengths), window))

    assert little([1000] * 9, 8, "contiguous", CAUSAL)
    assert not little([9000], 8, "contiguous", CAUSAL) and not little([9000], 8, "balanced", ALL_KEYS)
    assert little([9000], 8, "contiguous", (500, 0)) and little([9000], 8, "balanced", (500, 0))
    assert not little([100], 1, "balanced", CAUSAL)


@pytest.mark.parametrize("layout", ["balanced", "zigzag"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_between_two_parts_that_see_keys_is_nothing_to_read(world_size: int, layout: str) -> None:
    """In zigzag order, the last rank's two chunks are one, with another rank's chunks on both sides."""
    dealt = deal([16000], world_size, layout, (100, 100))
    spread = PackedSpread(tuple(tuple(arrange(parts, [16000])[0]) for parts in dealt), 16000, (16000,), (100, 100))
    for rank, source in itertools.permutations(range(world_size), 2):
        reading = spread.reading(rank, source)
        assert sum(keys.stop - keys.start for keys in reading.keys) <= 4 * 100
        seen = sum(block.keys.stop - block.keys.start for block in reading.blocks)
        assert seen == sum(keys.stop - keys.start for keys in reading.keys)


# --- On each rank -----------------------------------------------------------------------------------------------------


def rows_come_back(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import shard_varlen

    x = drawn(sum(LENGTHS), 3, seed=1).requires_grad_()
    offsets = offsets_of(LENGTHS)
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    both = init_device_mesh("cpu", (2, mesh.size() // 2))
    for group, layout in itertools.product((mesh, both), LAYOUTS):
        shards = shard_varlen(offsets, group=group, layout=layout, causal=True)
        assert shards.rank == rank
        own = shards.shard(x)
        assert own.shape == (shards.num_rows, 3) and shards.num_rows < 1.3 * len(x) / mesh.size() + 8
        assert torch.equal(shards.gather(own), x)
        assert torch.equal(shards.gather(own.T, -1), x.T)
        exists = shards.sequences() >= 0
        assert torch.equal(shards.shard(numbers, padding=-1), shards.sequences())
        assert torch.equal(shards.shard(places), shards.positions())
        assert not own[~exists].any()
        weight = drawn(*x.shape, seed=2) * (rank + 1)
        (grad,) = torch.autograd.grad((shards.gather(own) * weight).sum(), x)
        expected = drawn(*x.shape, seed=2) * sum(range(1, mesh.size() + 1))
        torch.testing.assert_close(shards.shard(grad), shards.shard(expected))
        assert not grad[~torch.isin(torch.arange(len(x)), shards.shard(torch.arange(len(x)), padding=-1))].any()


def results_and_gradients_are_those_of_one_process(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import shard_varlen

    for strategy, layout in itertools.product(STRATEGIES, LAYOUTS):
        shards = shard_varlen(offsets_of(LENGTHS), group=mesh, layout=layout, causal=True)
        for given in OPTIONS if mesh.size() == 2 else OPTIONS[1::2]:
            check_against_one_process(shards, strategy, given, {"layout": layout})


def keys_that_are_read_are_gathered_alone(rank: int, mesh: DeviceMesh) -> None:
    """Gathers the keys that are read, as ranks do where these are few; here always."""
    from fastattn.distributed import gathering, shard_varlen

    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("keys", "heads"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "reads_little", lambda spread: spread.world_size > 1)
        patch.setattr(gathering, "start_all_gather", None)  # must not be called
        for group, layout in itertools.product((mesh, both), LAYOUTS):
            shards = shard_varlen(offsets_of(LENGTHS), group=group, layout=layout, causal=True)
            for given in OPTIONS[group is both :: 2]:
                check_against_one_process(shards, "allgather", given, {"layout": layout, "mesh": group.ndim})


def heads_and_keys_over_a_mesh(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import shard_varlen

    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("keys", "heads"))
    for strategy, layout in itertools.product(STRATEGIES[:2], LAYOUTS):
        shards = shard_varlen(offsets_of(LENGTHS).tolist(), group=both, layout=layout)
        check_against_one_process(shards, strategy, OPTIONS[4], {"layout": layout, "mesh": 2}, kv_heads=2)


def check_against_one_process(
    shards: Any, strategy: str, given: dict[str, Any], about: dict[str, Any], kv_heads: int = 4
) -> None:
    from fastattn.distributed import context_parallel_attention_varlen

    whole, options = problem(kv_heads=kv_heads), with_tensors(given)
    expected = in_one_process(whole, **options)
    weights = [drawn(*result.shape, seed=9) for result in expected]
    learnt = [value for value in options.values() if isinstance(value, Tensor) and value.requires_grad]
    grads = torch.autograd.grad(expected, [*whole, *learnt], weights)
    own = [shards.shard(tensor.detach(), padding=float("nan")).requires_grad_() for tensor in whole]
    if "key_ranges" in options:
        options["key_ranges"] = shards.shard(options["key_ranges"], 1)
    found = context_parallel_attention_varlen(*own, shards, strategy=strategy, return_lse=True, **options)
    own_weights = [shards.shard(weights[0]), shards.shard(weights[1], 1)]
    own_grads = torch.autograd.grad(found, [*own, *learnt], own_weights)
    close = {"rtol": 1e-10, "atol": 1e-10, "msg": partial("{} {} {}: {}".format, strategy, about, given)}
    own_expected = shards.shard(expected[0]), shards.shard(expected[1], 1, padding=-torch.inf)
    torch.testing.assert_close((*found, *own_grads[:3]), (*own_expected, *map(shards.shard, grads[:3])), **close)
    for own_grad in own_grads[3:]:  # sums gradients over the ranks, as DDP does
        dist.all_reduce(own_grad)
    torch.testing.assert_close(own_grads[3:], grads[3:], **close)


def a_rank_without_rows_has_gradients(rank: int, mesh: DeviceMesh) -> None:
    """The gradients are 0, as DDP waits for them."""
    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen

    shards = shard_varlen([0, 4], group=mesh, causal=True)
    own = [shards.shard(tensor.detach(), padding=float("nan")).requires_grad_() for tensor in problem((4,))]
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    out, lse = context_parallel_attention_varlen(*own, shards, sinks=sinks, return_lse=True)
    grads = torch.autograd.grad(out.sum() + lse[:, shards.sequences() >= 0].sum(), [*own, sinks])
    has_rows = bool((shards.sequences() >= 0).any())
    assert all(grad.isfinite().all() for grad in grads)
    assert has_rows == any(grad.any() for grad in grads)


def indices_of_inference_serve_training(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen

    for strategy in STRATEGIES:
        shards = shard_varlen(offsets_of(LENGTHS), group=mesh, causal=True)
        whole = problem()
        slopes = drawn(len(LENGTHS), 4, seed=3).requires_grad_()
        options = {"strategy": strategy, "causal": True, "alibi_slopes": slopes}
        with torch.inference_mode():
            own = [shards.shard(tensor) for tensor in whole]
            shards.gather(context_parallel_attention_varlen(*own, shards, **options))
        own = [shards.shard(tensor) for tensor in whole]
        shards.gather(context_parallel_attention_varlen(*own, shards, **options)).sum().backward()


def whole_documents_cost_no_messages(rank: int, mesh: DeviceMesh) -> None:
    from torch.profiler import profile

    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen

    shards = shard_varlen([0, *itertools.accumulate([20] * mesh.size())], group=mesh, causal=True)
    own = [shards.shard(t.detach()).requires_grad_() for t in problem((20,) * mesh.size())]
    for strategy in STRATEGIES:
        with profile() as recorded:
            context_parallel_attention_varlen(*own, shards, strategy=strategy, causal=True).sum().backward()
        assert not [event.name for event in recorded.events() if "gloo" in event.name or "c10d" in event.name]


def checkpoints_graphs_and_autocast(rank: int, mesh: DeviceMesh) -> None:
    from torch.utils.checkpoint import checkpoint

    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen

    shards = shard_varlen(offsets_of(LENGTHS), group=mesh, causal=True)
    whole = problem()
    expected = in_one_process(whole, causal=True)[0]
    grads = torch.autograd.grad(expected.square().sum(), whole)
    for strategy in STRATEGIES:

        def attend(*own: Tensor, strategy: str = strategy) -> Any:
            return context_parallel_attention_varlen(*own, shards, strategy=strategy, causal=True) * 1.0

        own = [shards.shard(t.detach()).requires_grad_() for t in whole]
        compiled = torch.compile(attend, backend="aot_eager")
        for function in (lambda *own, f=attend: checkpoint(f, *own, use_reentrant=False), compiled):
            found = function(*own)
            own_grads = torch.autograd.grad(found.square().sum(), own)
            torch.testing.assert_close([found, *own_grads], list(map(shards.shard, (expected, *grads))))
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*(tensor.detach().float() for tensor in own))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), shards.shard(expected), atol=0.03, rtol=0.03)


def mistakes_are_errors_on_every_rank(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen

    for wrong, message in (
        ([0, 5, 3], "cu_seqlens: expected offsets that begin with 0 and do not fall"),
        (torch.tensor([1, 5]), "cu_seqlens: expected offsets that begin with 0"),
        ([], "cu_seqlens: expected offsets"),
    ):
        with pytest.raises(InputError, match=message):
            shard_varlen(wrong, group=mesh)
    with pytest.raises(InputError, match="layout: expected one of 'balanced', 'contiguous', 'zigzag', got 'even'"):
        shard_varlen([0, 5], group=mesh, layout="even")
    for wrong, message in (
        (torch.tensor([0.0, 5.0]), "cu_seqlens: expected torch.int32"),
        (torch.tensor([False, True]), "cu_seqlens: expected torch.int32"),
        ([0, 5.5], "cu_seqlens: expected an int, got float"),
    ):
        with pytest.raises((TypeError, InputError), match=message):
            shard_varlen(wrong, group=mesh)
    shards = shard_varlen(offsets_of(LENGTHS), group=mesh)
    own = [shards.shard(tensor.detach()) for tensor in problem()]
    with pytest.raises(InputError, match="query: expected a multiple of the 3 KV heads"):
        context_parallel_attention_varlen(own[0], own[1][:, :3], own[2][:, :3], shards)
    with pytest.raises(InputError, match=f"x: expected {sum(LENGTHS)} rows in dim 0, all sequences together, got 5"):
        shards.shard(torch.zeros(5))
    with pytest.raises(InputError, match=f"query: expected the {shards.num_rows} rows of shards, got 1"):
        context_parallel_attention_varlen(*(tensor[:1] for tensor in own), shards)
    with pytest.raises(InputError, match=r"shards: expected what shard_varlen\(cu_seqlens\) returns, got list"):
        context_parallel_attention_varlen(*own, [0, 5])
    with pytest.raises(InputError, match="alibi_slopes: expected"):
        context_parallel_attention_varlen(*own, shards, alibi_slopes=torch.ones(3))
    os.environ["FASTATTN_CHECK"] = "1"
    layout = LAYOUTS[rank == mesh.size() - 1]
    other = shard_varlen([0, 64], group=mesh, layout=layout, causal=True)
    rows = torch.zeros(other.num_rows, 4, 8)
    with pytest.raises(InputError, match=r"shards: expected the same on all ranks|raised an error"):
        context_parallel_attention_varlen(rows, rows, rows, other)
    del os.environ["FASTATTN_CHECK"]


def kernels_run(rank: int, mesh: DeviceMesh) -> None:
    import fastattn
    from fastattn.distributed import context_parallel_attention_varlen, shard_varlen
    from oracle import check_against_oracle

    lengths = (90, 12, 30)
    shards = shard_varlen(offsets_of(lengths), group=mesh, causal=True)
    for backend, strategy in itertools.product(("cuda", "triton"), STRATEGIES):
        whole = problem(lengths, kv_heads=2, dtype=torch.float16)
        exact = [t.detach().double().requires_grad_() for t in whole]
        options = {"causal": True, "window": (40, 0)}
        weights = drawn(sum(lengths), 4, 6, seed=9)
        results, composites = [], []
        for tensors, dtype, into in ((exact, torch.float64, results), (whole, torch.float16, composites)):
            out = in_one_process(tensors, lengths, compute_dtype=dtype, **options)[0]
            into += [out, *torch.autograd.grad(out, tensors, weights.to(out.dtype))]
        own = [shards.shard(tensor.detach()).requires_grad_() for tensor in whole]
        with fastattn.use_backend(backend):
            out = context_parallel_attention_varlen(*own, shards, strategy=strategy, **options)
            found = [out, *torch.autograd.grad(out, own, shards.shard(weights).half())]
        names = "out", "query", "key", "value"
        for name, *three in zip(names, found, map(shards.shard, results), map(shards.shard, composites), strict=True):
            check_against_oracle(name, *(tensor.detach() for tensor in three))


# --- Here -------------------------------------------------------------------------------------------------------------


OF_TWO_RANKS = (
    a_rank_without_rows_has_gradients,
    indices_of_inference_serve_training,
    whole_documents_cost_no_messages,
    checkpoints_graphs_and_autocast,
    mistakes_are_errors_on_every_rank,
)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_on_ranks(world_size: int) -> None:
    checks = (
        rows_come_back,
        results_and_gradients_are_those_of_one_process,
        keys_that_are_read_are_gathered_alone,
        *(OF_TWO_RANKS if world_size == 2 else [heads_and_keys_over_a_mesh]),
    )
    ranks.run(__name__, *(check.__name__ for check in checks), world_size=world_size, emulated=False)


@pytest.mark.slow
def test_with_kernels(emulated_gpu: None) -> None:
    ranks.run(__name__, kernels_run.__name__)
