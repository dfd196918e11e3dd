"""Tests that attention over ranks equals that of one process, for all strategies, layouts and options."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ranks
from fastattn import InputError, reference

STRATEGIES, LAYOUTS = ("ring", "allgather", "ulysses"), ("contiguous", "zigzag")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "sinks": (4,), "softcap": 3.0, "scale": 0.4},
    {"sinks": (4,)},
    {"window": (7, 0)},
    {"window": (5, 3), "softcap": 2.0},
    {"window": (-1, 4), "alibi_slopes": (4,), "scale": 0.3},
    {"alibi_slopes": (2, 4), "sinks": (4,)},
    {"dropout_p": 0.4, "dropout_seed": 77, "causal": True},
    {"causal": True, "alibi_slopes": (2, 4), "sinks": (4,), "window": (9, 9), "dropout_p": 0.2, "dropout_seed": 2**60},
    {"causal": True, "alibi_slopes": (4,), "sinks": (4,), "window": (9, 9), "softcap": 5.0},
    {"key_ranges": (1, 4), "causal": True, "dropout_p": 0.2, "dropout_seed": 5},
    {"key_ranges": (2, 1), "sinks": (4,), "window": (20, 9)},
]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(length: int = 32, kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draws tensors that are equal on every rank."""
    shapes = (2, 4, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, 6)
    return [drawn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def with_tensors(options: dict[str, Any], length: int) -> dict[str, Any]:
    """Replaces shapes by tensors that need gradients, or by ranges for ``length`` rows over as many keys."""

    def tensor(name: str, shape: Any) -> Any:
        if name == "key_ranges":
            cuts = drawn(*shape, length, 4, seed=8).sigmoid() * (length + 1)
            return cuts.sort(-1).values.to(torch.int32).clamp(max=length).unflatten(-1, (2, 2))
        return drawn(*shape, seed=7).abs().requires_grad_() if name in ("alibi_slopes", "sinks") else shape

    return {name: tensor(name, value) for name, value in options.items()}


def in_words(strategy: str, layout: str, given: dict[str, Any], text: str) -> str:
    return f"{strategy} {layout} {given}: {text}"


# --- On each rank -----------------------------------------------------------------------------------------------------


def sharding_and_gathering_are_inverse(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import gather_sequence, shard_sequence

    world_size = mesh.size()
    for layout, dim in itertools.product(LAYOUTS, (0, 1, -1)):
        x = drawn(24, 48, 24, seed=1).requires_grad_()
        mine = shard_sequence(x, dim, group=mesh, layout=layout)
        parts = x.chunk(world_size if layout == "contiguous" else 2 * world_size, dim)
        own = (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)
        assert torch.equal(mine, torch.cat([parts[part] for part in own], dim))
        whole = gather_sequence(mine, dim, group=mesh, layout=layout)
        assert torch.equal(whole, x)
        # Each rank has its own gradients for the whole; a shard gets their sum.
        weight = drawn(*x.shape, seed=2) * (rank + 1)
        (grad,) = torch.autograd.grad((whole * weight).sum(), x)
        expected = drawn(*x.shape, seed=2) * sum(range(1, world_size + 1))
        others = shard_sequence(torch.ones_like(x), dim, group=mesh, layout=layout)
        is_mine = torch.autograd.grad(shard_sequence(x, dim, group=mesh, layout=layout), x, others)[0]
        torch.testing.assert_close(grad, expected * is_mine)


def results_and_gradients_are_those_of_one_process(rank: int, mesh: DeviceMesh) -> None:
    of_this_size = OPTIONS if mesh.size() == 2 else OPTIONS[1::2] + OPTIONS[-2:]  # four processes share two cores
    for strategy, layout, given in itertools.product(STRATEGIES, LAYOUTS, of_this_size):
        check_against_one_process(mesh, strategy, layout, given)


def keys_that_are_read_are_gathered_alone(rank: int, mesh: DeviceMesh) -> None:
    """Gathers the keys that are read, as ranks do where these are few; here always."""
    from fastattn.distributed import gathering

    exchanged: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        count_exchanges(patch, exchanged)
        patch.setattr(gathering, "reads_little", lambda spread: spread.world_size > 1)
        for layout, given in itertools.product(LAYOUTS, OPTIONS[mesh.size() == 4 :: 2]):
            exchanged.clear()
            check_against_one_process(mesh, "allgather", layout, given)
            assert len(exchanged) == EXCHANGES_OF_A_HEAD * 4
        if mesh.size() == 4:
            exchanged.clear()
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
            check_against_one_process(both, "allgather", "zigzag", OPTIONS[-2])
            assert len(exchanged) == EXCHANGES_OF_A_HEAD * 2
    exchanged.clear()
    with pytest.MonkeyPatch.context() as patch:
        count_exchanges(patch, exchanged)
        check_against_one_process(mesh, "allgather", "contiguous", {"window": (9, 0)})
        assert not exchanged  # half of the keys are read: too many
        check_against_one_process(mesh, "allgather", "contiguous", {"window": (1, 0)})
        check_against_one_process(mesh, "allgather", "contiguous", {"window": (1, 0)}, length=22 * mesh.size())
        near = {"window": (1, 0), "dropout_p": 0.4, "dropout_seed": 3}  # dropout draws for four keys at a time
        check_against_one_process(mesh, "allgather", "contiguous", near, length=22 * mesh.size())
        assert len(exchanged) == 2 * EXCHANGES_OF_A_HEAD * 4


EXCHANGES_OF_A_HEAD = 3 * 2  # keys and values, each forward, backward, and their gradients


def count_exchanges(patch: pytest.MonkeyPatch, into: list[None]) -> None:
    from fastattn.distributed import gathering

    def counted(original: Callable[..., Tensor], *args: Any) -> Tensor:
        into.append(None)
        return original(*args)

    patch.setattr(gathering, "start_all_to_all", partial(counted, gathering.start_all_to_all))


def check_against_one_process(
    mesh: DeviceMesh, strategy: str, layout: str, given: dict[str, Any], length: int = 32
) -> None:
    from fastattn.distributed import context_parallel_attention, shard_sequence

    whole, options = problem(length), with_tensors(given, length)
    expected = reference.attention(*whole, **options)
    weights = [drawn(*result.shape, seed=9) for result in expected]
    learnt = [value for value in options.values() if isinstance(value, Tensor) and value.requires_grad]
    grads = torch.autograd.grad(expected, [*whole, *learnt], weights)

    def mine(tensor: Tensor) -> Tensor:
        return shard_sequence(tensor.detach(), 2, group=mesh, layout=layout)

    own = [mine(tensor).requires_grad_() for tensor in whole]
    if "key_ranges" in options:
        options["key_ranges"] = mine(options["key_ranges"])
    found = context_parallel_attention(*own, group=mesh, strategy=strategy, layout=layout, return_lse=True, **options)
    own_grads = torch.autograd.grad(found, [*own, *learnt], [mine(weight) for weight in weights])
    close = {"rtol": 1e-10, "atol": 1e-10, "msg": partial(in_words, strategy, layout, given)}
    own_results, own_expected = (*found, *own_grads[:3]), tuple(map(mine, (*expected, *grads[:3])))
    torch.testing.assert_close(own_results, own_expected, **close)
    for own_grad in own_grads[3:]:  # sums gradients over the ranks, as DDP does
        dist.all_reduce(own_grad)
    torch.testing.assert_close(own_grads[3:], grads[3:], **close)


def heads_and_keys_over_a_mesh(rank: int, mesh: DeviceMesh) -> None:
    """Ranks of the mesh's second dimension exchange sequence for heads."""
    from fastattn.distributed import context_parallel_attention, gather_sequence, shard_sequence

    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("keys", "heads"))
    options = with_tensors({"window": (9, 3), "alibi_slopes": (2, 4), "sinks": (4,), "dropout_p": 0.3}, 32)
    whole = problem(kv_heads=2)
    expected = reference.attention(*whole, **options, dropout_seed=5)
    learnt = [*whole, options["alibi_slopes"], options["sinks"]]
    grads = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), learnt)
    for strategy, layout in itertools.product(STRATEGIES[:2], LAYOUTS):
        own = [shard_sequence(t.detach(), 2, group=both, layout=layout).requires_grad_() for t in whole]
        for mine, flat in zip(own, whole, strict=True):
            assert torch.equal(mine, shard_sequence(flat, 2, group=mesh, layout=layout))
            assert torch.equal(gather_sequence(mine, 2, group=both, layout=layout), flat)
        out, lse = context_parallel_attention(
            *own, group=both, strategy=strategy, layout=layout, dropout_seed=5, return_lse=True, **options
        )
        found = torch.autograd.grad(out.square().sum() + lse.sum(), [*own, *learnt[3:]])
        for of_all_ranks in found[3:]:
            dist.all_reduce(of_all_ranks)
        sharded = [shard_sequence(result, 2, group=both, layout=layout) for result in (*expected, *grads[:3])]
        torch.testing.assert_close((out, lse, *found), (*sharded, *grads[3:]), rtol=1e-10, atol=1e-10)


def results_are_rounded_once(rank: int, mesh: DeviceMesh) -> None:
    """The 16-bit output and the gradient of values are the rounded exact ones, except where these lie between two
    numbers. (The other gradients depend on the rounded output.)"""
    from fastattn.distributed import context_parallel_attention, shard_sequence

    whole = problem(length=64, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in whole]
    expected = reference.attention(*exact, window=(40, 40))[0]
    weights = drawn(*expected.shape, seed=9, dtype=torch.bfloat16)
    for strategy in STRATEGIES[:2]:
        own = [shard_sequence(t.detach(), 2, group=mesh).requires_grad_() for t in whole]
        out = context_parallel_attention(*own, group=mesh, strategy=strategy, window=(40, 40))
        (grad,) = torch.autograd.grad(expected, exact[2], weights.double(), retain_graph=True)
        (own_grad,) = torch.autograd.grad(out, own[2], shard_sequence(weights, 2, group=mesh))
        for found, result in ((out, expected), (own_grad, grad)):
            rounded = shard_sequence(result.detach(), 2, group=mesh).to(torch.bfloat16)
            assert (found == rounded).double().mean() > 0.97, strategy


def a_drawn_seed_is_that_of_the_first_rank(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention, shard_sequence
    from fastattn.functional.dropout_seed import draw_seed

    whole = problem()
    torch.manual_seed(3)
    expected = reference.attention(*whole, dropout_p=0.5, dropout_seed=draw_seed(torch.device("cpu")))[0]
    for strategy in STRATEGIES:
        torch.manual_seed(3 + rank)
        own = [shard_sequence(t, 2, group=mesh) for t in whole]
        out = context_parallel_attention(*own, group=mesh, strategy=strategy, dropout_p=0.5)
        torch.testing.assert_close(out, shard_sequence(expected, 2, group=mesh), rtol=1e-10, atol=1e-10)


def fewer_kv_heads_checkpoints_and_graphs(rank: int, mesh: DeviceMesh) -> None:
    from torch.utils.checkpoint import checkpoint

    from fastattn.distributed import context_parallel_attention, shard_sequence

    whole = problem(kv_heads=2)
    expected = reference.attention(*whole, causal=True)[0]
    grads = torch.autograd.grad(expected.square().sum(), whole)
    for strategy in STRATEGIES if mesh.size() == 2 else STRATEGIES[:2]:

        def attend(*own: Tensor, strategy: str = strategy) -> Any:
            return context_parallel_attention(
                *own, group=mesh.get_group(), strategy=strategy, layout="zigzag", causal=True
            )

        own = [shard_sequence(t.detach(), 2, group=mesh, layout="zigzag").requires_grad_() for t in whole]
        compiled = torch.compile(attend, backend="aot_eager")
        for function in (attend, lambda *own, f=attend: checkpoint(f, *own, use_reentrant=False), compiled):
            found = function(*own)
            sharded = [shard_sequence(result, 2, group=mesh, layout="zigzag") for result in (expected, *grads)]
            torch.testing.assert_close([found, *torch.autograd.grad(found.square().sum(), own)], sharded)


def mistakes_are_errors_on_every_rank(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention, gather_sequence, shard_sequence

    query, key, value = (tensor[:, :, :6] for tensor in problem())

    def refused(message: str, *tensors: Tensor, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            context_parallel_attention(*tensors, group=mesh, **options)

    refused(
        "query: expected a multiple of 2 rows for zigzag, got 5",
        *(t[:, :, :5] for t in (query, key, value)),
        layout="zigzag",
    )
    refused("key: expected batch 2 and 6 rows", query, key[:, :, :4], value)
    refused(
        "strategy: expected one of 'ring', 'allgather', 'ulysses', got 'ring '", query, key, value, strategy="ring "
    )
    refused("query: expected parts of a multiple of 4 rows", query, key, value, strategy="ring", dropout_p=0.5)
    refused(
        "key: expected heads that are a multiple of ., the number of ranks .* got 1; pass strategy='ring'",
        query,
        key[:, :1],
        value[:, :1],
        strategy="ulysses",
    )
    both = init_device_mesh("cpu", (2, mesh.size() // 2))
    with pytest.raises(InputError, match="group: expected a mesh of one dimension for strategy 'ulysses', got 2"):
        context_parallel_attention(query, key, value, group=both, strategy="ulysses")
    for strategy in STRATEGIES:
        refused("value: expected .* with the key's", query, key, value[:, :2], strategy=strategy)
        refused("sinks: expected", query, key, value, strategy=strategy, sinks=torch.ones(8))
    refused("alibi_slopes: expected", query, key, value, strategy="ulysses", alibi_slopes=torch.ones(8))
    with pytest.raises(InputError, match="x: expected a multiple of"):
        shard_sequence(query[:, :, :1], 2, group=mesh)
    with pytest.raises(InputError, match="dim: expected one of the 4 dimensions of x, got 4"):
        gather_sequence(query, 4, group=mesh)
    os.environ["FASTATTN_CHECK"] = "1"
    odd = rank == mesh.size() - 1
    refused("layout: expected the same on all ranks", query, key, value, layout=LAYOUTS[odd])
    refused("query: expected the same on all ranks", *(t[:1] if odd else t for t in (query, key, value)))
    words = (
        "key: expected batch 2" if odd else f"rank {mesh.size() - 1} of the group raised an error: key: expected batch"
    )
    refused(words, query, key[:, :, :4] if odd else key, value)
    assert context_parallel_attention(query, key, value, group=mesh).shape == (2, 4, 6, 6)
    del os.environ["FASTATTN_CHECK"]


def kernels_run(rank: int, mesh: DeviceMesh) -> None:
    import fastattn
    from fastattn.distributed import context_parallel_attention, shard_sequence
    from oracle import check_against_oracle

    for backend, strategy in itertools.product(("cuda", "triton"), STRATEGIES):
        whole = problem(length=88, kv_heads=2, dtype=torch.float16)
        exact = [t.detach().double().requires_grad_() for t in whole]
        window = (40, 0)
        weights = drawn(2, 4, 88, 6, seed=9)
        results, composites = [], []
        for tensors, dtype, into in ((exact, torch.float64, results), (whole, torch.float16, composites)):
            out = reference.attention(*tensors, causal=True, window=window, compute_dtype=dtype)[0]
            into += [out, *torch.autograd.grad(out, tensors, weights.to(out.dtype))]

        def mine(tensor: Tensor) -> Tensor:
            return shard_sequence(tensor.detach(), 2, group=mesh, layout="zigzag")

        own = [mine(tensor).requires_grad_() for tensor in whole]
        with fastattn.use_backend(backend):
            out = context_parallel_attention(
                *own, group=mesh, strategy=strategy, layout="zigzag", causal=True, window=window
            )
            found = [out, *torch.autograd.grad(out, own, mine(weights).half())]
        for name, *three in zip(
            ("out", "query", "key", "value"), found, map(mine, results), map(mine, composites), strict=True
        ):
            check_against_oracle(name, *three)


def autocast_has_a_say(rank: int, mesh: DeviceMesh) -> None:
    """It computes in 16 bits, like attention in one process; gradients have the inputs' dtype."""
    from fastattn.distributed import context_parallel_attention, shard_sequence

    whole = problem(dtype=torch.float32)
    expected = reference.attention(*(tensor.detach().double() for tensor in whole), causal=True)[0]
    for strategy in STRATEGIES:
        own = [shard_sequence(tensor.detach(), 2, group=mesh).requires_grad_() for tensor in whole]
        with torch.autocast("cpu", torch.bfloat16):
            out = context_parallel_attention(*own, group=mesh, strategy=strategy, causal=True)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), shard_sequence(expected, 2, group=mesh), rtol=2e-2, atol=2e-2)
        out.float().square().sum().backward()
        assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in own)


def the_ring_sends_what_is_seen_and_no_more(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention, ring

    sent = 0
    exchange = dist.batch_isend_irecv

    def counted(messages: list[Any]) -> Any:
        nonlocal sent
        sent += sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
        return exchange(messages)

    ring.dist.batch_isend_irecv = counted
    own = [tensor[:, :, :6].detach().requires_grad_() for tensor in problem()]
    keys, world_size = own[1].nbytes + own[2].nbytes, mesh.size()
    for layout, causal in itertools.product(LAYOUTS, (False, True)):
        sent = 0
        out = context_parallel_attention(*own, group=mesh, strategy="ring", layout=layout, causal=causal)
        readers, read = world_size - 1, world_size - 1
        if causal and layout == "contiguous":
            readers, read = world_size - 1 - rank, rank
        halves = readers - rank if causal and layout == "zigzag" else 0  # later ranks need the first half only
        forward = (readers - halves) * keys + halves * keys // 2
        assert sent == forward
        out.sum().backward()
        halves = rank if causal and layout == "zigzag" else 0
        assert sent == 2 * forward + (read - halves) * keys + halves * keys // 2
    ring.dist.batch_isend_irecv = exchange


def keys_are_under_way_while_a_block_is_computed(rank: int, mesh: DeviceMesh) -> None:
    from fastattn.distributed import context_parallel_attention, local_attention, ring

    done: list[str] = []
    exchange, attend = dist.batch_isend_irecv, local_attention.attention_block

    def exchanged(messages: list[Any]) -> Any:
        done.append("keys sent")
        return exchange(messages)

    def attended(*args: Any, **kwargs: Any) -> Any:
        done.append("block computed")
        return attend(*args, **kwargs)

    ring.dist.batch_isend_irecv, local_attention.attention_block = exchanged, attended
    context_parallel_attention(*(tensor.detach() for tensor in problem()), group=mesh, strategy="ring")
    ring.dist.batch_isend_irecv, local_attention.attention_block = exchange, attend
    assert done == ["keys sent", "block computed"] * (mesh.size() - 1) + ["block computed"]


def a_rank_that_is_missing_is_an_error_that_names_the_call(rank: int, mesh: DeviceMesh) -> None:
    """The error comes after the group's time-out, which must be long enough for making the group, too."""
    from fastattn.distributed import context_parallel_attention

    for strategy in STRATEGIES[:2]:
        dist.barrier()
        group = dist.new_group(timeout=datetime.timedelta(seconds=4))
        if rank == 0:
            message = f"context_parallel_attention with strategy '{strategy}': waited in vain for another rank"
            with pytest.raises(RuntimeError, match=message):
                context_parallel_attention(*problem(), group=group, strategy=strategy)


# --- Here -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_on_ranks(world_size: int) -> None:
    checks = (
        sharding_and_gathering_are_inverse,
        results_and_gradients_are_those_of_one_process,
        keys_that_are_read_are_gathered_alone,
        heads_and_keys_over_a_mesh,
        results_are_rounded_once,
        a_drawn_seed_is_that_of_the_first_rank,
        fewer_kv_heads_checkpoints_and_graphs,
        autocast_has_a_say,
        the_ring_sends_what_is_seen_and_no_more,
        keys_are_under_way_while_a_block_is_computed,
        mistakes_are_errors_on_every_rank,
        *([a_rank_that_is_missing_is_an_error_that_names_the_call] if world_size == 2 else []),
    )
    ranks.run(__name__, *(check.__name__ for check in checks), world_size=world_size, emulated=False)


@pytest.mark.slow
def test_with_kernels(emulated_gpu: None) -> None:
    ranks.run(__name__, kernels_run.__name__)


def test_without_a_group() -> None:
    from fastattn.distributed import context_parallel_attention

    with pytest.raises(InputError, match=r"group: .* call torch\.distributed\.init_process_group"):
        context_parallel_attention(*problem())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("uses_positions", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 7), (-1, 9), (20, -1), (0, 0)], ids=str)
def test_the_blocks_are_the_mask(window: tuple[int, int], uses_positions: bool, layout: str, world_size: int) -> None:
    """Each visible pair of positions is in exactly one block: of the ring, of all keys, and of those that are read."""
    from fastattn.distributed.blocks import Spread
    from fastattn.distributed.gathering import exchanged_keys
    from fastattn.distributed.sequence import parts_of_rank, parts_per_rank

    length, total = 8, 8 * world_size
    part = length // parts_per_rank(layout)
    spread = Spread(layout, world_size, length, window, uses_positions)
    of_rank = [
        torch.cat([torch.arange(p * part, (p + 1) * part) for p in parts_of_rank(layout, rank, world_size)])
        for rank in range(world_size)
    ]
    expected = mask_of(torch.arange(total), torch.arange(total), window)
    in_ring, over_all, over_read = (torch.zeros_like(expected) for _ in range(3))
    for rank in range(world_size):
        for block in spread.blocks_over_all_keys(rank):
            add_pairs(over_all, of_rank[rank][block.rows], torch.arange(total)[block.keys], block, uses_positions)
        exchanged = exchanged_keys(spread, rank)
        places = [torch.arange(0), *(torch.arange(of.first, of.first + of.length) for of in exchanged.ranges)]
        read = torch.cat(places)
        assert torch.equal(read, read.unique())
        for block in exchanged.blocks:
            add_pairs(over_read, of_rank[rank][block.rows], read[block.keys], block, uses_positions)
        for source in range(world_size):
            reading = spread.reading(rank, source)
            read = torch.cat([torch.arange(0), *(of_rank[source][keys] for keys in reading.keys)])
            for block in reading.blocks:
                add_pairs(in_ring, of_rank[rank][block.rows], read[block.keys], block, uses_positions)
            # All keys that are read are needed, except for rounding up to multiples of four.
            assert len(read) <= int(expected[of_rank[rank]][:, of_rank[source]].any(0).sum()) + 3 * len(reading.keys)
    assert all(torch.equal(seen, expected) for seen in (in_ring, over_all, over_read))
    work = [int(in_ring[rows].sum()) for rows in of_rank]
    if window == (-1, 0) and world_size > 1:
        assert len(set(work)) == 1 if layout == "zigzag" else work == sorted(set(work))


def mask_of(rows: Tensor, keys: Tensor, window: tuple[int, int]) -> Tensor:
    distance = keys - rows[:, None]
    left, right = window
    return (((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))).long()


def add_pairs(seen: Tensor, rows: Tensor, keys: Tensor, block: Any, uses_positions: bool) -> None:
    """Adds the pairs of a block, whose positions must be right."""
    own_rows, own_keys = block.first_row + torch.arange(len(rows)), block.first_key + torch.arange(len(keys))
    seen[rows[:, None], keys] += mask_of(own_rows, own_keys, block.window)
    if uses_positions:
        assert torch.equal(own_rows, rows) and torch.equal(own_keys, keys)
        assert block.first_key % 4 == 0
