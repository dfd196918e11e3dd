"""The model of attention over GPUs: its messages are those that ranks really send, and what it makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ranks
from benchmarks.predict import context_parallel
from benchmarks.predict.context_parallel import GPUS, HEADS, MASKS, is_possible, seconds_per_head, waiting, ways
from benchmarks.predict.ring_schedule import (
    Collective,
    Compute,
    Exchange,
    Heads,
    Links,
    Operation,
    Pieces,
    Result,
    Shape,
    Wait,
    schedule,
    simulate,
)
from fastattn.distributed.blocks import Spread, Window
from fastattn.profiler.work import visible_pairs

FULL, CAUSAL = (-1, -1), (-1, 0)
LAYOUTS = ("contiguous", "zigzag")
STRATEGIES = ("ring", "allgather", "ulysses")
ROWS = 8  # of a rank
# Of all ranks. Six KV heads are not as many in each group that is gathered.
HEADS_OF_WORLD = {2: Heads(12, 6, 4), 4: Heads(8, 4, 4), 8: Heads(16, 8, 4)}

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_world_size = pytest.mark.parametrize("world_size", [2, 4, 8])


def spread_of(layout: str, world_size: int, window: Window, rows: int = ROWS) -> Spread:
    return Spread(layout, world_size, rows, window, goes_by_places=False)


# --- Real messages ----------------------------------------------------------------------------------------------------


def expected_of(operations: list[Operation], rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """What a rank does by the schedule: messages, blocks, and waits for a message, in their order."""
    done: list[tuple[Any, ...]] = []
    started: dict[str, int] = {}
    for operation in operations:
        if isinstance(operation, Exchange):
            reader, source = (rank + operation.shift) % world_size, (rank - operation.shift) % world_size
            for kind, peer, receiver in (("send", reader, reader), ("receive", source, rank)):
                nbytes = int(operation.nbytes[receiver])
                done += [(kind, peer, nbytes // 2)] * (2 if nbytes else 0)
                if nbytes:
                    started.setdefault(operation.name, len(started))
        elif isinstance(operation, Collective):
            done.append((operation.kind, operation.nbytes))
            started[operation.name] = len(started)
        elif isinstance(operation, Pieces):
            sent, received = operation.nbytes[:, rank], operation.nbytes[rank]
            done.append(("all_to_all", sent.astype(int).tolist(), received.astype(int).tolist()))
            started[operation.name] = len(started)
        elif isinstance(operation, Wait) and operation.name in started:
            done.append(("wait", started[operation.name]))
        elif isinstance(operation, Compute):
            done += [("compute", operation.heads, shape.rows, shape.keys) for shape in operation.blocks[rank]]
    return done


def record(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """From now on, what this process does."""
    from torch.distributed import _functional_collectives as functional

    from fastattn.distributed import gathering, local_attention

    done: list[tuple[Any, ...]] = []
    numbers = itertools.count()

    def replace(module: Any, name: str, by: Callable[..., Any]) -> None:
        patch.setattr(module, name, partial(by, getattr(module, name)))

    def exchange(original: Callable[..., Any], messages: list[dist.P2POp]) -> list[Any]:
        for message in messages:
            kind, peer = "send" if message.op is dist.isend else "receive", message.peer
            done.append((kind, dist.get_group_rank(message.group, peer), message.tensor.nbytes))
        number, works = next(numbers), original(messages)

        def wait_for_all() -> None:
            done.append(("wait", number))
            for work in works:
                work.wait()

        return [SimpleNamespace(wait=wait_for_all)]

    def start(original: Callable[..., Any], kind: str, tensor: Tensor, *args: Any) -> Any:
        done.append((kind, *splits(tensor, args)) if kind == "all_to_all" else (kind, tensor.nbytes))
        number, started = next(numbers), original(tensor, *args)

        def wait(call: str) -> Any:
            done.append(("wait", number))
            return started.wait(call)

        return SimpleNamespace(wait=wait)

    def splits(tensor: Tensor, args: tuple[Any, ...]) -> Iterator[list[int]]:
        """Bytes sent to each rank, and received."""
        of_entry = tensor[0].nbytes
        yield from ([count * of_entry for count in counts] for counts in (args[1], args[0]))

    def exchange_heads(original: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        done.append(("all_to_all", tensor.nbytes))
        return original(tensor, *args)

    def wait(original: Callable[..., Any], tensor: Tensor) -> Tensor:  # at once, and for nothing else
        if not isinstance(tensor, functional.AsyncCollectiveTensor):  # which calls again with what it holds
            done.append(("wait", next(numbers)))
        return original(tensor)

    def attend(original: Callable[..., Any], query: Tensor, key: Tensor, *args: Any) -> Any:
        done.append(("compute", *query.shape[1:3], key.shape[2]))
        return original(query, key, *args)

    def add_gradients(original: Callable[..., Any], sums: Any, of_slopes: Any, tensors: Any, *args: Any) -> None:
        done.append(("compute", *tensors.query.shape[1:3], tensors.key.shape[2]))
        original(sums, of_slopes, tensors, *args)

    replace(dist, "batch_isend_irecv", exchange)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        replace(gathering, f"start_{kind}", lambda original, *args, kind=kind: start(original, kind, *args))
    replace(functional, "all_to_all_single", exchange_heads)
    replace(functional, "wait_tensor", wait)
    replace(local_attention, "attention_block", attend)
    replace(local_attention, "add_gradients_of_block", add_gradients)
    return done


def messages_are_those_of_the_schedule(rank: int, mesh: DeviceMesh) -> None:
    """Eight processes, and the same as four groups of two and as two of four, side by side."""
    by_twos, by_fours = (
        init_device_mesh("cpu", (8 // size, size), mesh_dim_names=("groups", "ranks")) for size in (2, 4)
    )
    windows = CAUSAL, (9, 0), (1, 0), FULL, (2, 11)
    plain = {2: (by_twos["ranks"], windows[::2]), 4: (by_fours["ranks"], windows), 8: (mesh, windows[:2])}
    for world_size, (group, of_windows) in plain.items():
        for strategy, window in itertools.product(STRATEGIES, of_windows):
            by_heads = world_size if strategy == "ulysses" else 1
            compare(rank % world_size, world_size, group, strategy, by_heads, window)
    for strategy, window in itertools.product(STRATEGIES[:2], windows[:2]):
        compare(rank, 8, by_twos, strategy, 2, window)


def compare(rank: int, world_size: int, group: DeviceMesh, strategy: str, by_heads: int, window: Window) -> None:
    from fastattn.distributed import context_parallel_attention

    heads = HEADS_OF_WORLD[world_size]
    own = [
        torch.randn(1, num_heads, ROWS, heads.dim, dtype=torch.bfloat16, requires_grad=True)
        for num_heads in (heads.query, heads.kv, heads.kv)
    ]
    for layout in LAYOUTS:
        spread = spread_of(layout, world_size // by_heads, window, ROWS * by_heads)
        expected = [
            expected_of(schedule(strategy, spread, heads, backward, by_heads), rank // by_heads, spread.world_size)
            for backward in (False, True)
        ]
        if strategy == "ulysses":  # computes in one call over the whole sequence
            expected = [[step for step in steps if step[0] != "compute"] for steps in expected]
        with pytest.MonkeyPatch.context() as patch:
            forward = record(patch)
            out = context_parallel_attention(*own, group=group, strategy=strategy, layout=layout, window=window)
        with pytest.MonkeyPatch.context() as patch:
            backward = record(patch)
            torch.autograd.grad(out, own, torch.randn_like(out))
        assert [forward, backward] == expected, (world_size, by_heads, strategy, layout, window)


@pytest.mark.slow
def test_messages_of_processes() -> None:
    ranks.run(__name__, messages_are_those_of_the_schedule.__name__, world_size=8, emulated=False)


# --- The simulation ---------------------------------------------------------------------------------------------------


def one_per_pair(shape: Shape) -> float:
    return float(shape.pairs)


def free_links() -> Links:
    return Links(8, float("inf"), 0.0, float("inf"), 0.0)


def simulated(
    strategy: str, layout: str, world_size: int, window: Window, backward: bool = False, links: Links | None = None
) -> Result:
    operations = schedule(strategy, spread_of(layout, world_size, window), Heads(2, 2, 4), backward)
    return simulate(operations, world_size, links or free_links(), one_per_pair)


@each_world_size
@each_layout
@pytest.mark.parametrize("strategy", ["ring", "allgather"])
def test_every_pair_is_computed_once(strategy: str, layout: str, world_size: int) -> None:
    total = ROWS * world_size
    for window in (FULL, (9, 0), (2, 11), (0, 0)):
        found = simulated(strategy, layout, world_size, window)
        assert found.computing.sum() == 2 * visible_pairs(total, total, *window)  # of both heads


@each_world_size
@each_layout
@pytest.mark.parametrize("strategy", ["ring", "allgather"])
def test_without_a_mask_a_rank_receives_all_other_keys(strategy: str, layout: str, world_size: int) -> None:
    keys = 2 * 2 * ROWS * 4  # numbers in a rank's K and V
    for window in (FULL,) if strategy == "ring" else (FULL, CAUSAL):
        forward, backward = (simulated(strategy, layout, world_size, window, later) for later in (False, True))
        for way in ("received", "sent"):
            assert (getattr(forward, way) == (world_size - 1) * 2 * keys).all()  # 16 bits
            assert (getattr(backward, way) == (world_size - 1) * (2 + 4) * keys).all()  # and gradients in 32


@each_world_size
def test_what_nobody_sees_is_not_sent(world_size: int) -> None:
    key = 2 * 2 * 4 * 2  # bytes in K and V
    near = simulated("ring", "contiguous", world_size, (ROWS, 0))  # the rank before alone
    assert near.received.tolist() == [0.0] + [ROWS * key] * (world_size - 1)
    assert near.sent.tolist() == [ROWS * key] * (world_size - 1) + [0.0]
    assert not simulated("ring", "contiguous", world_size, (0, 0), backward=True).received.any()
    late = simulated("ring", "contiguous", world_size, CAUSAL)
    assert late.received.tolist() == [rank * ROWS * key for rank in range(world_size)]
    for layout, window in itertools.product(LAYOUTS, (CAUSAL, (9, 0), (2, 11))):
        found = simulated("ring", layout, world_size, window, backward=True)
        assert found.sent.sum() == found.received.sum()


def test_an_allgather_sends_what_is_seen_where_that_is_little() -> None:
    key = 2 * 2 * 4 * 2  # bytes in K and V
    near = simulated("allgather", "contiguous", 8, (ROWS, 0))
    assert near.received.tolist() == [0.0] + [ROWS * key] * 7
    assert near.sent.tolist() == [ROWS * key] * 7 + [0.0]
    most = simulated("allgather", "contiguous", 4, (ROWS, 0))  # a third of what others have
    assert most.received.tolist() == [3 * ROWS * key] * 4


def test_pieces_take_the_links_of_their_ranks() -> None:
    """In two nodes of two GPUs, one apart from the other: what a rank receives within a node and from the other."""
    links = Links(2, 100.0, 1.0, 10.0, 2.0)
    nbytes = torch.tensor([[9, 100, 50, 50], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]]).double().numpy()
    assert links.pieces_seconds(Pieces("", nbytes.T)).tolist() == [2 + 10, 1 + 1, 2 + 5, 2 + 5]
    assert links.pieces_seconds(Pieces("", nbytes)).tolist() == [2 + 10] * 4
    found = simulate([Pieces("keys", nbytes), Wait("keys")], 4, links, one_per_pair)
    assert found.seconds == 12
    assert found.received.tolist() == [200, 0, 0, 0] and found.sent.tolist() == [0, 100, 50, 50]


@each_world_size
def test_causal_work_is_even_in_zigzag_order_alone(world_size: int) -> None:
    contiguous, zigzag = (simulated("ring", layout, world_size, CAUSAL) for layout in LAYOUTS)
    assert (contiguous.computing == contiguous.computing[0] * (1 + 2 * torch.arange(world_size).numpy())).all()
    assert contiguous.seconds == contiguous.computing[-1]
    assert len(set(zigzag.computing)) == 1 and zigzag.computing.sum() == contiguous.computing.sum()
    assert not zigzag.idle.any()


def test_two_ranks_by_hand() -> None:
    """Each computes a block in 2 s and receives K and V in 3 s, and gradients in 6 s."""
    heads = Heads(1, 1, 4)
    links = Links(8, 2 * ROWS * 4 * 2 / 2.5, 0.5, 1.0, 1e9)
    spread = spread_of("contiguous", 2, FULL)
    forward, backward = (
        simulate(schedule("ring", spread, heads, later), 2, links, lambda _: 2.0) for later in (False, True)
    )
    assert forward.seconds == pytest.approx(3 + 2)  # the own block meanwhile
    assert forward.idle.tolist() == pytest.approx([1 / 5] * 2)
    assert backward.seconds == pytest.approx(3 + 2 + 5.5)  # nothing is left to compute while gradients travel


def test_a_head_of_the_own_block_hides_the_last_gradients() -> None:
    """Two ranks with two heads compute a head of a block in 2 s, receive K and V in 1 s and gradients in 2 s."""
    links = Links(8, 2 * 2 * ROWS * 4 * 2, 0.0, 1.0, 1e9)
    operations = schedule("ring", spread_of("contiguous", 2, FULL), Heads(2, 2, 4), backward=True)
    found = simulate(operations, 2, links, lambda _: 2.0)
    assert found.seconds == pytest.approx(2 + 4 + 2)
    assert not found.idle.any()


def test_messages_wait_for_those_before_and_for_both_ranks() -> None:
    links = Links(8, 1.0, 0.0, 1.0, 0.0)
    blocks = [(Shape(1, 1, 0, FULL),), (Shape(1, 2, 0, FULL),)]  # the second rank computes 2 s
    one, none = torch.ones(2).double().numpy(), torch.zeros(2).double().numpy()
    operations: list[Operation] = [
        Exchange("first", 1, 4 * one),
        Compute(blocks, 1),
        Exchange("second", 1, one),
        Wait("second"),
        Compute(blocks, 1),
        Exchange("nothing", 1, none),
        Wait("nothing"),
    ]
    assert simulate(operations, 2, links, one_per_pair).seconds == 4 + 1 + 2
    assert simulate(operations[1:], 2, links, one_per_pair).seconds == 2 + 1 + 2


def test_a_node_receives_a_shard_once() -> None:
    links = Links(8, 100.0, 1.0, 10.0, 2.0)

    def seconds(kind: str, nbytes: int, num_ranks: int, stride: int = 1) -> float:
        return links.collective_seconds(Collective("", kind, nbytes, num_ranks, stride))

    assert seconds("all_gather", 100, 8) == 7 * 1 + 7
    assert seconds("all_gather", 100, 16) == 14 * 1 + 2 + 15  # eight shards by eight adapters; NVLink takes longer
    assert seconds("all_gather", 100, 2, stride=8) == 2 + 10
    assert seconds("reduce_scatter", 1600, 16) == seconds("all_gather", 100, 16)
    assert seconds("all_to_all", 800, 8) == 1 + 7
    assert seconds("all_to_all", 1600, 16) == 2 + 80  # each GPU has its own adapter alone


def test_messages_to_another_node_take_its_links() -> None:
    within, across = (
        simulated("ring", "contiguous", 2, FULL, links=Links(per_node, 1e9, 0.0, 1.0, 0.0)) for per_node in (2, 1)
    )
    assert within.seconds < 2 * ROWS * ROWS * 2 + 1 < across.seconds


# --- The page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpus", [8, 128])
def test_longer_sequences_hide_more(num_gpus: int) -> None:
    for way in (way for way in ways(num_gpus) if is_possible(way, HEADS[0])):
        shares = [waiting(way, num_gpus, HEADS[0], 1 << log2)[0] for log2 in range(14, 21)]
        assert shares == sorted(shares, reverse=True), way
        assert shares[-1] < 0.1


def test_kernels_have_the_published_rate() -> None:
    assert seconds_per_head(Shape(4096, 4096, 0, FULL), False) == pytest.approx(4 * 128 * 4096**2 / 671e12)
    assert seconds_per_head(Shape(4096, 4096, 0, CAUSAL), True) == pytest.approx(5 * 128 * 4096**2 / 474e12)
    assert seconds_per_head(Shape(64, 64, 0, MASKS["causal"]), False) == pytest.approx(2 * 128 * 64**2 / 484e12)
    assert seconds_per_head(Shape(0, 0, 0, FULL), False) == 0


@pytest.mark.slow
def test_the_page_says_that_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it is of this version: ``python -m benchmarks context-parallel`` writes it again."""
    pytest.importorskip("matplotlib")
    assert context_parallel.main(["--folder", str(tmp_path)]) == 0
    text = (tmp_path / "context_parallel_speed.md").read_text()
    assert "**Nothing on this page is measured.**" in text
    assert all(text.count(name) >= 2 * len(HEADS) for name in GPUS.values())
    assert (context_parallel.DOCS / "context_parallel_speed.md").read_text() == text
    assert (tmp_path / "context_parallel_speed.svg").read_text().startswith("<?xml")
    printed = capsys.readouterr().out
    assert "Predicted, not measured." in printed and "context_parallel_speed.md" in printed
