"""Predicts from which length on attention over a sequence spread over GPUs hides messages behind compute.

``python -m benchmarks context-parallel`` prints the tables, and writes ``docs/context_parallel_speed.md`` and its plot.
Nothing there is measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tabulate import tabulate

from benchmarks.predict.ring_schedule import Heads, Links, Result, Shape, schedule, simulate
from fastattn.distributed.blocks import Spread, Window
from fastattn.distributed.sequence import LAYOUTS
from fastattn.ops.flops import attention_backward_flops, attention_flops

DOCS = Path(__file__).parents[2] / "docs"

PER_NODE = 8
ACHIEVED = 0.8  # the part of a link's rate that is achieved, an assumption
# H200's data sheet: NVLink 900 GB/s, both ways together. DGX H200's: an InfiniBand adapter of 400 Gb/s for each GPU.
# Latencies of a step of NCCL's rings: hwLat in its src/graph/tuning.cc, protocol Simple.
LINKS = Links(PER_NODE, ACHIEVED * 450e9, 3.4e-6, ACHIEVED * 50e9, 14e-6)

# TFLOP/s of cuDNN 9.19 on an H200, as published with cudnn-frontend: forward and backward, by the sequence's length, in
# bf16 with 64 query and 8 KV heads of 128 dims. Shorter blocks take the rate of 2k, longer ones that of 32k.
LENGTHS_OF_RATES = (2048, 4096, 8192, 16384, 32768)
RATES = {
    "causal": ((484, 591, 644, 673, 688), (370, 474, 541, 579, 581)),
    "full": ((633, 671, 691, 702, 693), (504, 560, 594, 612, 572)),
}
FLOPS = (attention_flops, attention_backward_flops)

HEADS = (Heads(64, 8), Heads(32, 32))
GPUS = {8: "8 H200s, NVLink", 128: "16 nodes of 8", 1024: "128 nodes of 8"}
LENGTHS = tuple(2**i for i in range(12, 21))
MASKS: dict[str, Window] = {"full": (-1, -1), "causal": (-1, 0), "window of 4096": (4095, 0)}
MOST_WAITING = 0.05
FEWEST_ROWS = 512  # the fewest rows of a rank in the plot


class Way(NamedTuple):
    """A way to spread attention over GPUs: ``by_heads`` ranks exchange parts of the sequence for heads."""

    name: str
    strategy: str
    by_heads: int


def ways(num_gpus: int) -> list[Way]:
    """Returns the ways with all GPUs in one dimension, and those in a mesh whose second dimension is a node's GPUs."""
    plain = [Way("ring", "ring", 1), Way("allgather", "allgather", 1), Way("ulysses", "ulysses", num_gpus)]
    mesh = [Way(f"mesh, {way.name}", way.strategy, PER_NODE) for way in plain[:2]]
    return plain + (mesh if num_gpus > PER_NODE else [])


def is_possible(way: Way, heads: Heads) -> bool:
    return heads.kv % way.by_heads == 0


@cache
def seconds_per_head(shape: Shape, backward: bool) -> float:
    """Returns the predicted seconds of attention, or its backward pass, over a block for one query head of 128 dims."""
    rates = RATES["full" if shape.pairs == shape.rows * shape.keys else "causal"][backward]
    side = max(1.0, math.sqrt(shape.rows * shape.keys))
    rate = np.interp(math.log2(side), np.log2(LENGTHS_OF_RATES), rates)
    return FLOPS[backward](shape.pairs, 128, 128) / (float(rate) * 1e12)


@cache
def predict(way: Way, num_gpus: int, heads: Heads, tokens: int, layout: str, mask: str, backward: bool) -> Result:
    """Predicts one call over a sequence of ``tokens`` tokens, or its backward pass."""
    ranks = num_gpus // way.by_heads
    spread = Spread(layout, ranks, tokens // ranks, MASKS[mask], goes_by_places=False)
    operations = schedule(way.strategy, spread, heads, backward, way.by_heads)
    return simulate(operations, ranks, LINKS, partial(seconds_per_head, backward=backward))


def waiting(
    way: Way, num_gpus: int, heads: Heads, tokens: int, layout: str = "zigzag", mask: str = "causal"
) -> list[float]:
    """Returns the share of a forward and a backward pass in which ranks wait: the mean and the largest of all ranks."""
    passes = [predict(way, num_gpus, heads, tokens, layout, mask, backward) for backward in (False, True)]
    idle = 1 - (passes[0].computing + passes[1].computing) / (passes[0].seconds + passes[1].seconds)
    return [float(idle.mean()), float(idle.max())]


def hidden_from(way: Way, num_gpus: int, heads: Heads) -> int | None:
    """Returns the length from which on ranks wait for at most ``MOST_WAITING`` of the time; None if no length does."""
    found = None
    for tokens in reversed(LENGTHS):
        if waiting(way, num_gpus, heads, tokens)[0] > MOST_WAITING:
            break
        found = tokens
    return found


# --- The page ---------------------------------------------------------------------------------------------------------

_CAUSAL, _FULL = (
    "/".join(str(rates[LENGTHS_OF_RATES.index(1 << 14)]) for rates in RATES[m]) for m in ("causal", "full")
)

_FORWARD, _BACKWARD = (flops(1, 128, 128) for flops in FLOPS)
_NEAR, _FAR = LINKS.node_latency * 1e6, LINKS.network_latency * 1e6

_HEADING = f"""# Sequences over GPUs: predicted speed

Generated by `python -m benchmarks context-parallel`: do not edit. **Nothing on this page is measured.** It says what a
model of `fastattn.distributed` predicts for H200s, on which nobody has run it.

```{{image}} context_parallel_speed.svg
:alt: predicted share of the time in which ranks wait, by tokens, a panel for each number of GPUs
```

The model simulates every block that a rank computes and every message, in the order of the code; a test counts the
real messages of 2 to 8 processes and compares. It is about attention of one layer, forward and backward: batch 1, bf16,
heads of 128 dims.

```text
seconds of a block   = query heads * pairs of a row and a key that the mask leaves * FLOPs of a pair / kernel's rate
seconds of a message = latency + bytes / ({ACHIEVED:.0%} of the link's rate), from when both ranks have come to it
share of waiting     = 1 - seconds in which a rank computes / seconds until the last rank is done
```

A pair takes {_FORWARD} FLOPs forward and {_BACKWARD} backward. A rank computes a block as soon as its keys have
come, while the next are under way. The model takes

- for kernels, what cuDNN on an H200 reaches, as published with cudnn-frontend: {_CAUSAL} TFLOP/s forward/backward
  under a causal mask at 16k, {_FULL} without a mask, and less for shorter blocks down to 2k (64 / 8 heads, taken for
  32 / 32 too). Our kernels have no measured figure yet. Behind slower kernels, more is hidden;
- NVLink between the {PER_NODE} GPUs of a node: 900 GB/s in both directions together (H200's data sheet), 450 each way.
  InfiniBand between nodes: an adapter of 400 Gb/s for each GPU (DGX H200's data sheet), 50 GB/s each way.
  {ACHIEVED:.0%} of both is assumed to be achieved. A message takes {_NEAR:g} µs more on NVLink and {_FAR:g} µs
  more on InfiniBand, as NCCL assumes for a step of its rings (`src/graph/tuning.cc`);
- a network without other traffic or detours, and GPUs that begin together.

It leaves out merging in float32, copies, launches, and what messages take from kernels (SMs, memory bandwidth). Blocks
of fewer than 2k rows run slower than assumed here, so figures for few tokens on many GPUs are rough.
"""

_LENGTHS = f"""## From which length on messages are hidden

Tokens of the whole sequence from which on ranks wait for at most {MOST_WAITING:.0%} of a forward and a backward pass.
Causal, `layout="zigzag"`; heads are query / KV heads. "mesh": `group` is a mesh of two dimensions, of which the second
is the GPUs of a node. Ulysses hides nothing: its messages only become short beside what is computed. It needs at least
as many KV heads as ranks.
"""

_NODES = f"""In a ring, keys come from the rank that has them: they enter a node {PER_NODE} times, once for each
GPU. With a mesh they enter it once, some heads to each GPU, and with NCCL's gathering too. An allgather hides all but
its first group of heads, and has one group alone where a rank has one KV head.
"""

_IDLE = f"""## How long ranks wait

For messages, or at the end for other ranks: the share of a forward and a backward pass. In front the mean of all ranks,
in brackets the rank that waits most. {HEADS[0].query} query and {HEADS[0].kv} KV heads. With a window, contiguous parts
are even work already. An allgather brings in all keys, but where no rank sees more than a quarter of the others'.
"""

_BYTES = """## What a rank receives

GB forward / backward, 1M tokens, causal, zigzag: the rank that receives most.
"""


def in_words(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def _table(cell: Callable[[Way, int, Heads], str]) -> str:
    """Returns a table with a row for each cluster and numbers of heads, and a column for each way."""
    names = [way.name for way in ways(max(GPUS))]
    rows = []
    for num_gpus, name in GPUS.items():
        for heads in HEADS:
            cells = {way.name: cell(way, num_gpus, heads) for way in ways(num_gpus) if is_possible(way, heads)}
            rows.append([name, f"{heads.query} / {heads.kv}", *(cells.get(name, "–") for name in names)])
    return tabulate(rows, ["GPUs", "heads", *names], "pipe", disable_numparse=True)


def _length(way: Way, num_gpus: int, heads: Heads) -> str:
    found = hidden_from(way, num_gpus, heads)
    return f"> {in_words(LENGTHS[-1])}" if found is None else in_words(found)


def _gigabytes(way: Way, num_gpus: int, heads: Heads) -> str:
    passes = (predict(way, num_gpus, heads, 1 << 20, "zigzag", "causal", backward) for backward in (False, True))
    return " / ".join(f"{found.received.max() / 1e9:.2f}" for found in passes)


def _table_of_idle() -> str:
    rows = []
    for num_gpus, tokens in ((8, 1 << 17), (128, 1 << 20)):
        for way in ways(num_gpus):
            for mask in MASKS if way.strategy != "ulysses" else ():
                shares = (waiting(way, num_gpus, HEADS[0], tokens, layout, mask) for layout in LAYOUTS)
                cells = (f"{mean:.1%} ({most:.1%})" for mean, most in shares)
                rows.append([GPUS[num_gpus], in_words(tokens), way.name, mask, *cells])
    return tabulate(rows, ["GPUs", "tokens", "strategy", "mask", *LAYOUTS], "pipe", disable_numparse=True)


def page() -> str:
    """Returns the Markdown page."""
    return "\n".join(
        [
            _HEADING,
            f"{_LENGTHS}\n{_table(_length)}\n\n{_NODES}",
            f"{_IDLE}\n{_table_of_idle()}\n",
            f"{_BYTES}\n{_table(_gigabytes)}\n",
        ]
    )


def draw(path: Path) -> None:
    """Draws the plot: a panel for each number of GPUs, a line for each way and numbers of heads."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastattn"  # so that the same picture has the same bytes
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(GPUS), figsize=(12, 4.5), sharex=True, sharey=True, layout="constrained")
    colors = {way.name: i for i, way in enumerate(ways(max(GPUS)))}
    lines = {}
    for axis, (num_gpus, name) in zip(axes, GPUS.items(), strict=True):
        for way in ways(num_gpus):
            for style, heads in zip(("-", "--"), HEADS, strict=True):
                if not is_possible(way, heads):
                    continue
                lengths = [tokens for tokens in LENGTHS if tokens * way.by_heads // num_gpus >= FEWEST_ROWS]
                shares = [waiting(way, num_gpus, heads, tokens)[0] for tokens in lengths]
                label = f"{way.name}, {heads.query} / {heads.kv} heads"
                color = f"C{colors[way.name]}"
                (lines[label],) = axis.plot(lengths, shares, style, color=color, linewidth=1.2, marker=".")
        axis.axhline(MOST_WAITING, color="0.6", linewidth=0.8)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("tokens of the sequence")
        axis.set_xscale("log", base=2)
        axis.set_xticks(LENGTHS[::2], map(in_words, LENGTHS[::2]))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.supylabel("share of the time in which ranks wait")
    figure.suptitle("Predicted, not measured: causal attention, zigzag, forward and backward")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str]) -> int:
    """Prints the tables and writes the page and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DOCS, help="where to write (default: docs)")
    folder = parser.parse_args(arguments).folder
    text = page()
    print("Predicted, not measured.\n\n" + text[text.index("## ") :])
    (folder / "context_parallel_speed.md").write_text(text)
    draw(folder / "context_parallel_speed.svg")
    print(f"wrote {folder / 'context_parallel_speed.md'} and its plot")
    return 0
