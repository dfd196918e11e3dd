"""Writes docs/PERFORMANCE.md from the JSON under benchmarks/results, or with ``--check`` only compares the two."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.measure import results
from benchmarks.measure import tables as table
from benchmarks.measure.results import Document

PAGE = ROOT / "docs" / "PERFORMANCE.md"

_TITLES = {
    "attention_forward": "Attention, forward",
    "attention_backward": "Attention, backward",
    "decode": "Decoding over a KV cache",
    "int8_matmul": "Linear layers with int8 weights",
}
_HEAD = """# Performance

`python -m benchmarks page` generates this page from the JSON files in `benchmarks/results`: do not edit it. It gives
figures only for what was measured.

How a figure is taken:

- The result is checked against float64 first. A kernel of fastattn may err by twice as much as PyTorch in the same
  dtype, a peer by 5 % of the largest value. An implementation that fails the check is not timed.
- CUDA events then time single calls after a warm-up. The calls alternate between random inputs, so that no call finds
  its inputs in the L2. A figure is the median of 11 to 201 calls. Short calls are also timed within a CUDA graph,
  without the cost of a launch; the tables then use the time in the graph.
- FLOPs are the operations of the matrix products: half of them under a causal mask (the FlashAttention papers'
  convention), or only the visible pairs if a sequence has fewer queries than keys (chunked prefill). Bytes count every
  input and every output once.
- "of limit" compares with a limit that the same run measured: a device copy, a large cuBLAS matmul, or the smallest
  possible kernel, whichever limits the case. "error" is the worst difference from float64, relative to the largest
  value. "to best peer" is the best peer's time over fastattn's (both in CUDA graphs, or both eager): above 1, fastattn
  is faster."""


def page(folder: Path, page_path: Path) -> str:
    """Returns the page for the results in ``folder``, with links relative to the folder of ``page_path``."""
    documents = {path: results.read(path) for path in sorted(folder.glob("*/*.json")) if path.stem in _TITLES}
    parts = [_HEAD]
    measured = {document["benchmark"] for document in documents.values()}
    if never := [f"- {title}" for name, title in _TITLES.items() if name not in measured]:
        parts.append("## Never measured\n\nNo run on a GPU has been recorded for:\n\n" + "\n".join(never))
    for _, of_gpu in itertools.groupby(documents, key=lambda path: path.parent):
        paths = list(of_gpu)
        parts.append(f"## {documents[paths[0]]['environment']['gpu']}")
        parts += [_section(path, documents[path], page_path) for path in paths]
    overhead = folder / "cpu-only" / "overhead.json"
    if overhead.exists():
        parts.append(_overhead(json.loads(overhead.read_text())))
    return "\n\n".join(parts) + "\n"


def _section(path: Path, document: Document, page_path: Path) -> str:
    place = document["environment"]
    when = f"{document['date']}, commit {document['commit']}"
    where = (
        f"{place['gpu']} ({place['num_sms']} SMs, compute capability {place['compute_capability']}), driver "
        f"{place['driver']}, CUDA {place['cuda']}, torch {place['torch']}, triton {place['triton']}"
    )
    parts = [f"### {_TITLES[document['benchmark']]}", f"{when}; {where}. [All figures]({_link(path, page_path)}).\n"]
    parts[-1] += table.limits_line(document)
    if not document["complete"]:
        parts.append("This run ended before all its cases were done.")
    for plot in (f"{document['benchmark']}.png", f"{document['benchmark']}_roofline.png"):
        if (path.parent / plot).exists():
            parts.append(f"![{plot}]({_link(path.parent / plot, page_path)})")
    parts.append(table.as_markdown(document["rows"]))
    others = table.without_figures(document["rows"])
    if others:
        parts.append(f"Without figures:\n\n{others}")
    return "\n\n".join(parts)


def _overhead(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return (
        "## What a call costs on the host\n\n"
        "`python -m benchmarks overhead`: the time from the public function to the operator, with operators that "
        "do nothing; no GPU takes part.\n\n"
        f"{machine.get('date', 'date not recorded')}, commit {machine['commit']}; {machine['cpu']}, Python "
        f"{machine['python']}, torch {machine['torch']}.\n\n" + table.overhead_table(document["rows"], "pipe")
    )


def _link(target: Path, page_path: Path) -> str:
    return Path(os.path.relpath(target, page_path.parent)).as_posix()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not what would be written")
    options = parser.parse_args(arguments)
    text = page(results.FOLDER, PAGE)
    if not options.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
        print(f"written: {PAGE}")
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE} is not what `python -m benchmarks page` writes: run it")
