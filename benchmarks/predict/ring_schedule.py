"""Lists in which order ranks compute and send for attention over a spread sequence, and simulates how long it takes.

A schedule mirrors ``fastattn.distributed``: its ``Spread`` says which rank reads and computes what, and a test compares
the messages with those that are really sent. Each rank has two queues, as NCCL makes them: one of kernels and one of
messages. Messages leave in the order in which they were started, and not before kernels that were started earlier are
done. A message begins when both its ranks have reached it, messages to several ranks when all have. Links carry both
directions at their full rate at once, and no other traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastattn.distributed.blocks import Block, Spread, Window
from fastattn.distributed.gathered import MOST_GROUPS_OF_HEADS
from fastattn.distributed.gathering import plan_of, reads_little
from fastattn.distributed.ring import heads_of_own_block
from fastattn.profiler.work import LSE_BYTES, visible_pairs

Array = NDArray[np.float64]


class Shape(NamedTuple):
    """The shape of a block: its rows, its keys, its window, and its first row's position minus its first key's."""

    rows: int
    keys: int
    ahead: int
    window: Window

    @property
    def pairs(self) -> int:
        """The number of pairs of a row and a key that the mask leaves."""
        return visible_pairs(self.rows, self.keys, *self.window, offset=self.ahead)


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int = 128
    item_bytes: int = 2

    @property
    def sum_bytes(self) -> int:
        """The bytes of a number that ranks add up: that of float32, or of a larger dtype of the tensors."""
        return max(LSE_BYTES, self.item_bytes)


# --- What all ranks do, one operation after the other -----------------------------------------------------------------


class Exchange(NamedTuple):
    """Messages of K and V, or of their gradients, to each rank from the rank ``shift`` places before it.

    ``nbytes`` has the bytes of both tensors by receiving rank. The group's ranks are ``stride`` places apart.
    """

    name: str
    shift: int
    nbytes: Array
    stride: int = 1


class Collective(NamedTuple):
    """A collective operation. ``nbytes`` is the size of the tensor that each rank passes in."""

    name: str
    kind: str
    nbytes: int
    num_ranks: int
    stride: int = 1

    @property
    def shard(self) -> float:
        """The bytes that one rank would send to another if each rank sent its own."""
        return self.nbytes / (1 if self.kind == "all_gather" else self.num_ranks)


class Pieces(NamedTuple):
    """Pieces from each rank to each: ``nbytes`` ``[reader, source]`` includes a rank's own keys, which are not sent."""

    name: str
    nbytes: Array
    stride: int = 1

    @property
    def sent(self) -> Array:
        """The bytes ``[reader, source]`` that go to other ranks."""
        return self.nbytes * (1 - np.eye(len(self.nbytes)))


class Wait(NamedTuple):
    """Makes kernels that are started later wait until the messages of this name have arrived."""

    name: str


class Compute(NamedTuple):
    """The blocks that each rank computes, with ``heads`` query heads."""

    blocks: list[tuple[Shape, ...]]
    heads: int


Operation = Exchange | Collective | Pieces | Wait | Compute


def schedule(strategy: str, spread: Spread, heads: Heads, backward: bool, by_heads: int = 1) -> list[Operation]:
    """Returns the operations of one call.

    ``by_heads`` ranks exchange parts of the sequence for heads, and ``spread`` is over groups of such ranks. Ulysses
    does only that exchange, and its ``spread`` has one rank.
    """

    def exchanged(*tensors: tuple[str, int]) -> Iterator[Operation]:
        for name, row_bytes in tensors if by_heads > 1 else ():
            nbytes = spread.length // by_heads * row_bytes
            yield from (Collective(name, "all_to_all", nbytes, by_heads), Wait(name))

    row = heads.dim * heads.item_bytes
    query, key, value = ("query", heads.query * row), ("key", heads.kv * row), ("value", heads.kv * row)
    output = "output", heads.query * row
    over_keys = _gather if strategy == "allgather" else _ring
    own_heads = heads._replace(query=heads.query // by_heads, kv=heads.kv // by_heads)
    between = over_keys(spread, own_heads, backward, by_heads)
    if backward:  # autograd reverses the order
        return [*exchanged(output), *between, *exchanged(value, key, query)]
    return [*exchanged(query, key, value), *between, *exchanged(output)]


def _ring(spread: Spread, heads: Heads, backward: bool, stride: int) -> Iterator[Operation]:
    steps, per_key = _read_by_step(spread), 2 * heads.kv * heads.dim
    num_keys = [np.array([read.num_keys for read in step], dtype=np.float64) for step in steps]

    def start_keys(step: int) -> Iterator[Operation]:
        if step < spread.world_size:
            yield Exchange(f"keys {step}", step, num_keys[step] * per_key * heads.item_bytes, stride)

    own = [read.blocks for read in steps[0]]
    first_heads, last_heads = heads_of_own_block(heads.kv, spread.world_size if backward else 1)
    per_kv_head = heads.query // heads.kv

    yield from start_keys(1)
    yield Compute(own, (first_heads.stop - first_heads.start) * per_kv_head)
    for step, reads in enumerate(steps[1:], 1):
        yield Wait(f"keys {step}")
        yield from start_keys(step + 1)
        yield Compute([read.blocks for read in reads], heads.query)
        if backward:
            if step > 1:
                yield Wait(f"gradients {step - 1}")
            of_owner = np.roll(num_keys[step], -step) * per_key * heads.sum_bytes
            yield Exchange(f"gradients {step}", -step, of_owner, stride)
    if last_heads.start < last_heads.stop:
        yield Compute(own, (last_heads.stop - last_heads.start) * per_kv_head)
    if backward and spread.world_size > 1:
        yield Wait(f"gradients {spread.world_size - 1}")


def _gather(spread: Spread, heads: Heads, backward: bool, stride: int) -> Iterator[Operation]:
    world_size = spread.world_size
    num_groups = min(heads.kv, MOST_GROUPS_OF_HEADS) if world_size > 1 else 1
    counts = [end - begin for begin, end in pairwise(heads.kv * i // num_groups for i in range(num_groups + 1))]
    num_read, blocks = _read_by_all(spread)

    def exchange(name: str, kind: str, per_key: int) -> Operation:
        goes_back = kind == "reduce_scatter"
        if num_read is None:
            num_keys = spread.length * (world_size if goes_back else 1)
            return Collective(name, kind, num_keys * per_key, world_size, stride)
        return Pieces(name, (num_read.T if goes_back else num_read) * per_key, stride)

    def start(i: int) -> Iterator[Operation]:
        for name in ("keys", "values") if i < num_groups else ():
            yield exchange(f"{name} {i}", "all_gather", counts[i] * heads.dim * heads.item_bytes)

    def start_back(i: int) -> Iterator[Operation]:
        for name in ("keys", "values") if backward else ():
            yield exchange(f"gradients of {name} {i}", "reduce_scatter", counts[i] * heads.dim * heads.sum_bytes)

    def finish(i: int) -> Iterator[Operation]:
        yield from (Wait(f"gradients of {name} {i}") for name in ("keys", "values") if backward and i >= 0)

    yield from start(0)
    for i, count in enumerate(counts):
        yield from (Wait(f"keys {i}"), Wait(f"values {i}"))
        yield from start(i + 1)
        yield Compute(blocks, count * heads.query // heads.kv)
        yield from finish(i - 1)
        yield from start_back(i)
    yield from finish(num_groups - 1)


@cache
def _read_by_all(spread: Spread) -> tuple[Array | None, list[tuple[Shape, ...]]]:
    """Returns how many keys each rank reads of each, None if all ranks read all keys, and the blocks of each rank."""
    ranks = range(spread.world_size)
    if not reads_little(spread):
        return None, [_shapes(spread.blocks_over_all_keys(rank), spread) for rank in ranks]
    plans = [plan_of(spread, rank) for rank in ranks]
    num_read = np.array([plan.read.by_rank for plan in plans], dtype=np.float64)
    return num_read, [_shapes(plan.blocks, spread) for plan in plans]


class _Read(NamedTuple):
    num_keys: int
    blocks: tuple[Shape, ...]


@cache
def _read_by_step(spread: Spread) -> list[list[_Read]]:
    """Returns for each step of a ring what each rank reads and computes."""
    ranks, found = range(spread.world_size), dict[_Read, _Read]()

    def read(rank: int, source: int) -> _Read:
        reading = spread.reading(rank, source)
        one = _Read(sum(keys.stop - keys.start for keys in reading.keys), _shapes(reading.blocks, spread))
        return found.setdefault(one, one)  # there may be a million reads, few of which differ

    return [[read(rank, (rank - step) % spread.world_size) for rank in ranks] for step in ranks]


def _shapes(blocks: tuple[Block, ...] | list[Block], spread: Spread) -> tuple[Shape, ...]:
    return tuple(
        Shape(
            len(range(spread.length)[block.rows]),
            block.keys.stop - block.keys.start,
            block.first_row - block.first_key,
            block.window,
        )
        for block in blocks
    )


# --- How long it takes ------------------------------------------------------------------------------------------------


class Links(NamedTuple):
    """The links of a GPU: bytes per second in each direction, and the latency of a message in seconds.

    One link goes to the ``per_node`` GPUs of its node, the other, an adapter of each GPU, to other nodes.
    """

    per_node: int
    node_rate: float
    node_latency: float
    network_rate: float
    network_latency: float

    def message_seconds(self, source: NDArray[np.int64], reader: NDArray[np.int64], nbytes: Array) -> Array:
        is_near = source // self.per_node == reader // self.per_node
        near, far = self.node_latency + nbytes / self.node_rate, self.network_latency + nbytes / self.network_rate
        return np.where(is_near, near, far)

    def pieces_seconds(self, pieces: Pieces) -> Array:
        """Returns the seconds for each rank until it has received its pieces and its readers have received theirs."""
        places = np.arange(len(pieces.nbytes)) * pieces.stride
        is_near = places[:, None] // self.per_node == places // self.per_node

        def one_way(nbytes: Array) -> Array:
            near, far = (np.where(chosen, nbytes, 0.0).sum(1) for chosen in (is_near, ~is_near))
            latency = np.where(far > 0, self.network_latency, np.where(near > 0, self.node_latency, 0.0))
            taken: Array = latency + np.maximum(near / self.node_rate, far / self.network_rate)
            return taken

        received, sent = one_way(pieces.sent), one_way(pieces.sent.T)
        by_readers = np.where(pieces.sent.T > 0, received, 0.0).max(1)
        return np.maximum(received, np.maximum(sent, by_readers))

    def collective_seconds(self, collective: Collective) -> float:
        """Returns the seconds of a collective operation.

        In an all-to-all, every rank sends to every other. Otherwise NCCL's rings are used: each GPU passes on what the
        GPU before it has sent, so that a shard enters a node once, and all adapters of the node share that load.
        """
        ranks, shard = collective.num_ranks, collective.shard
        near = min(ranks, max(1, self.per_node // collective.stride))
        nodes = ranks // near
        if collective.kind == "all_to_all":
            latency = self.network_latency if nodes > 1 else self.node_latency
            return latency + max((near - 1) * shard / self.node_rate, (ranks - near) * shard / self.network_rate)
        latency = (ranks - nodes) * self.node_latency + (nodes - 1) * self.network_latency
        through_node = (ranks - 1) * shard / self.node_rate if near > 1 else 0.0
        return latency + max(through_node, (ranks - near) * shard / (near * self.network_rate))


class Result(NamedTuple):
    """The seconds until the last rank is done; and by rank, the seconds in which it computes, and its bytes."""

    seconds: float
    computing: Array
    received: Array
    sent: Array

    @property
    def idle(self) -> Array:
        """The share of the time in which each rank waits."""
        return 1 - self.computing / self.seconds


def simulate(
    operations: list[Operation], world_size: int, links: Links, seconds_per_head: Callable[[Shape], float]
) -> Result:
    """Simulates the operations of a group's ranks, which begin together."""
    ranks = np.arange(world_size)
    now, last_message, computing, received, sent = np.zeros((5, world_size))
    arrived: dict[str, Array] = {}
    for operation in operations:
        if isinstance(operation, Wait):
            now = np.maximum(now, arrived[operation.name])
        elif isinstance(operation, Compute):
            spent = np.array([sum(map(seconds_per_head, blocks)) for blocks in operation.blocks]) * operation.heads
            now, computing = now + spent, computing + spent
        elif isinstance(operation, Pieces):
            start = np.maximum(now, last_message)
            meets = operation.sent + operation.sent.T > 0
            begin = np.maximum(start, np.where(meets, start, 0.0).max(1))
            last_message = arrived[operation.name] = begin + links.pieces_seconds(operation)
            received += operation.sent.sum(1)
            sent += operation.sent.sum(0)
        elif isinstance(operation, Collective):
            start = max(now.max(), last_message.max())
            last_message = arrived[operation.name] = np.full(world_size, start + links.collective_seconds(operation))
            received += (operation.num_ranks - 1) * operation.shard
            sent += (operation.num_ranks - 1) * operation.shard
        else:
            nbytes, stride = operation.nbytes, operation.stride
            source, reader = (ranks - operation.shift) % world_size, (ranks + operation.shift) % world_size
            start = np.maximum(now, last_message)
            end = np.maximum(start, start[source]) + links.message_seconds(source * stride, ranks * stride, nbytes)
            end = np.where(nbytes > 0, end, 0.0)
            arrived[operation.name] = np.maximum(end, end[reader])  # a rank's own message is sent when it has arrived
            last_message = np.maximum(last_message, arrived[operation.name])
            received += nbytes
            sent += nbytes[reader]
    return Result(float(max(now.max(), last_message.max())), computing, received, sent)
