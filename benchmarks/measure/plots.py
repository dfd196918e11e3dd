"""Draws the plots of a document of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.measure.implementations import CUBLAS
from benchmarks.measure.labels import label, seconds_of
from benchmarks.measure.results import Document, Row, limits_of

Figure = Any
_MARKERS = "osD^vP*X<>ph"
_PANELS, _FEWEST_POINTS = 9, 3
_ROOF_STYLES = ("-", "--", ":")


def draw(document: Document, folder: Path) -> list[Path]:
    """Draws every plot of the document as a PNG into ``folder`` and returns the files; none without an "ok" row."""
    rows = [row for row in document["rows"] if row["status"] == "ok"]
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    name = document["benchmark"]
    figures = {f"{name}.png": _LINES[name](document, rows), f"{name}_roofline.png": draw_roofline(document, rows)}
    paths = []
    for file, figure in figures.items():
        figure.text(0.005, 0.005, _origin(document), fontsize=7, color="0.4")
        figure.savefig(folder / file, dpi=130)
        plt.close(figure)
        paths.append(folder / file)
    return paths


def _origin(document: Document) -> str:
    place = document["environment"]
    day = document["date"][:10]
    return f"{place['gpu']}, driver {place['driver']}, torch {place['torch']}, {day}, commit {document['commit'][:12]}"


def draw_throughput(document: Document, rows: list[Row]) -> Figure:
    """Draws TFLOP/s by length, with one panel for each head dim, mask, heads and dtype."""
    limits = limits_of(document)
    return _panels(
        rows,
        ("seqlen", "batch"),
        "sequence length",
        "TFLOP/s",
        lambda row: row["flops"] / seconds_of(row) / 1e12,
        lambda row: limits.flops_per_s[row["case"]["dtype"]] / 1e12,
        "cuBLAS matmul",
    )


def draw_decode(document: Document, rows: list[Row]) -> Figure:
    """Draws GB/s by context, with one panel for each batch, grouping and kind of cache."""
    limits = limits_of(document)
    return _panels(
        rows,
        ("context",),
        "context",
        "GB/s",
        lambda row: row["bytes"] / seconds_of(row) / 1e9,
        lambda row: limits.bytes_per_s / 1e9,
        "device copy",
    )


def draw_int8(document: Document, rows: list[Row]) -> Figure:
    """Draws the speed-up over cuBLAS with 16-bit weights by M, in a panel for each layer, granularity and direction."""
    baseline = {label(row["case"]): seconds_of(row) for row in rows if row["implementation"] == CUBLAS}
    compared = [row for row in rows if label(row["case"]) in baseline]
    return _panels(
        compared or rows,
        ("m",),
        "rows M",
        "speed-up over cuBLAS with a 16-bit weight" if compared else "calls per second",
        lambda row: baseline.get(label(row["case"]), 1.0) / seconds_of(row),
        lambda row: 2.0,
        "half the weight's bytes",
    )


def draw_roofline(document: Document, rows: list[Row]) -> Figure:
    """Draws each case of fastattn's kernels as a point under the roofs that were measured in the same run."""
    limits = limits_of(document)
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    own = [row for row in rows if not row["is_peer"]]
    intensities = [row["flops"] / row["bytes"] for row in own or rows]
    span = np.geomspace(min(*intensities, 1.0) / 2, max(*intensities, 1000.0) * 2, 200)
    for style, (dtype, rate) in zip(_ROOF_STYLES, limits.flops_per_s.items(), strict=False):
        roof = np.minimum(span * limits.bytes_per_s, rate) / 1e12
        axes.plot(span, roof, color="black", linestyle=style, linewidth=1.2, label=f"device copy, {dtype} matmul")
    for index, name in enumerate(dict.fromkeys(row["implementation"] for row in own)):
        of_name = [row for row in own if row["implementation"] == name]
        axes.scatter(
            [row["flops"] / row["bytes"] for row in of_name],
            [row["flops"] / seconds_of(row) / 1e12 for row in of_name],
            marker=_MARKERS[index % len(_MARKERS)],
            s=28,
            alpha=0.8,
            label=name,
        )
    title = f"Roofline: {document['benchmark'].replace('_', ' ')}"
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.supxlabel(" ")  # room for the line of `_origin`
    return figure


_LINES: dict[str, Callable[[Document, list[Row]], Figure]] = {
    "attention_forward": draw_throughput,
    "attention_backward": draw_throughput,
    "decode": draw_decode,
    "int8_matmul": draw_int8,
}


def _panels(
    rows: list[Row],
    running: tuple[str, ...],
    x_title: str,
    y_title: str,
    rate: Callable[[Row], float],
    limit: Callable[[Row], float],
    limit_name: str,
) -> Figure:
    """Draws ``rate``, with a panel for each setting of the fields that are not ``running``, and a line for each
    implementation. ``running`` has the field along the x axis, then one that changes with it to keep the tokens."""
    axis = running[0]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row["case"], without=running), []).append(row)
    chosen = _chosen({setting: len({row["case"][axis] for row in group}) for setting, group in groups.items()})
    columns = min(len(chosen), 3)
    lines = -(-len(chosen) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(max(5.2 * columns, 7), 4.2 * lines + 0.9), squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for panel, setting in zip(grid.flat, chosen, strict=False):
        _draw_lines(panel, groups[setting], names, axis, rate)
        panel.axhline(limit(groups[setting][0]), color="black", linestyle="--", linewidth=1, label=limit_name)
        panel.set(xscale="log", xlabel=x_title, ylabel=y_title)
        panel.set_title(setting, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        ticks = sorted({row["case"][axis] for row in groups[setting]})
        panel.set_xticks(ticks, [_short(tick) for tick in ticks], fontsize=8)
        panel.minorticks_off()
    for panel in list(grid.flat)[len(chosen) :]:
        panel.set_visible(False)
    handles = {text: line for panel in grid.flat for line, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=8)
    figure.supxlabel(" ")  # room for the line of `_origin`
    return figure


def _chosen(points: dict[str, int]) -> list[str]:
    """Returns the settings to draw, evenly chosen from ``points`` (setting → number of points), longest lines first."""
    long = [setting for setting in points if points[setting] >= _FEWEST_POINTS] or list(points)
    long.sort(key=lambda setting: -points[setting])
    step = max(len(long) / _PANELS, 1.0)
    return [long[int(index * step)] for index in range(min(len(long), _PANELS))]


def _draw_lines(panel: Any, rows: Iterable[Row], names: list[str], axis: str, rate: Callable[[Row], float]) -> None:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        by_name.setdefault(row["implementation"], []).append((row["case"][axis], rate(row)))
    for name, points in by_name.items():
        index = names.index(name)
        is_own = name.startswith("fastattn")
        panel.plot(
            *zip(*sorted(points), strict=True),
            color=f"C{index % 10}",
            marker=_MARKERS[index % len(_MARKERS)],
            linewidth=2.4 if is_own else 1.2,
            markersize=5,
            label=name,
            zorder=3 if is_own else 2,
        )


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)
