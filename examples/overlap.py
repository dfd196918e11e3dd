"""Finds how much of a rank's communication overlaps with its compute, from a ``torch.profiler`` profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]  # begin and end, in microseconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns sorted disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def duration(intervals: Iterable[Interval]) -> float:
    """Returns the total length of intervals that are disjoint."""
    return sum(end - begin for begin, end in intervals)


@dataclass(frozen=True)
class Timeline:
    """Holds disjoint intervals: in which a rank computes, and in which its messages are under way.

    A message's interval begins when the message starts. With NCCL it ends when the message has arrived, and includes
    the wait for the other side. With gloo it ends when the message has arrived and the rank has waited for it.
    """

    compute: list[Interval] = field(default_factory=list)
    communication: list[Interval] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Any], device: torch.device) -> Timeline:
        """Returns the timeline of ``profile.events()``, in microseconds from the first interval.

        On a GPU it takes kernels; on a CPU, gloo's messages and the operators that call no other operators.
        """
        compute: list[Interval] = []
        communication: list[Interval] = []
        for event in events:
            interval = event.time_range.start, event.time_range.end
            if device.type == "cuda":
                is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
                if is_kernel:
                    (communication if "nccl" in event.name.lower() else compute).append(interval)
            elif event.name.startswith("gloo:"):
                communication.append(interval)
            elif event.name.startswith("aten::") and not event.cpu_children:
                compute.append(interval)
        first = min((begin for begin, _ in compute + communication), default=0.0)
        return cls(*(union((begin - first, end - first) for begin, end in those) for those in (compute, communication)))

    @property
    def hidden(self) -> float:
        """Returns the microseconds in which messages are under way while the rank computes."""
        either = duration(union(self.compute + self.communication))
        return duration(self.compute) + duration(self.communication) - either


def print_table(timelines: list[Timeline]) -> None:
    print("\n  rank   compute, ms   messages under way, ms   of these during compute")
    for rank, timeline in enumerate(timelines):
        compute, messages = duration(timeline.compute), duration(timeline.communication)
        share = f"{timeline.hidden / messages:24.0%}" if messages else f"{'-':>24}"
        print(f"{rank:6} {compute / 1000:13.1f} {messages / 1000:24.1f}  {share}")


def plot(timelines: list[Timeline], title: str, path: Path) -> None:
    """Draws two rows of bars for each rank into the file ``path``: compute above, messages below."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.7 * len(timelines)), layout="constrained")
    for rank, timeline in enumerate(timelines):
        for name, intervals, below in (("compute", timeline.compute, -0.35), ("messages", timeline.communication, 0.0)):
            bars = [(begin / 1000, (end - begin) / 1000) for begin, end in intervals]
            colour = "tab:blue" if name == "compute" else "tab:orange"
            axes.broken_barh(bars, (rank + below, 0.3), facecolors=colour, label=name if rank == 0 else None)
    axes.set(xlabel="milliseconds", title=title, yticks=range(len(timelines)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(timelines))])
    axes.invert_yaxis()
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
