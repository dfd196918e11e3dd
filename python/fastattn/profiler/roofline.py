"""Computes the roofline, which bounds a kernel's time by its work and the machine's limits (Williams, Waterman,
Patterson, "Roofline", 2009).

Times are in seconds, work is in bytes and FLOPs, rates are in bytes and FLOPs per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fastattn.profiler.work import Work

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch overhead"


@dataclass(frozen=True)
class Limits:
    """Holds the measured limits of one GPU.

    Args:
        bytes_per_s: reads plus writes of a large copy within device memory.
        flops_per_s: dtype (``"bfloat16"``) → the throughput of a large cuBLAS matmul of random numbers of this dtype.
        eager_launch_s, graph_launch_s: the time of a kernel that does nothing, launched by itself, and as one node of a
            CUDA graph.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    eager_launch_s: float
    graph_launch_s: float


class Bound(NamedTuple):
    """Names the resource that binds a kernel, and gives the least time that it can take."""

    resource: str
    least_s: float

    def fraction(self, seconds: float) -> float:
        """Returns how near a kernel that took ``seconds`` came to its limit: 1 is the limit itself."""
        return self.least_s / seconds


def bound(work: Work, limits: Limits, dtype: str, launch_s: float) -> Bound:
    """Returns the resource that binds ``work`` in ``dtype``, and the least time.

    If compute and memory traffic each take less than ``launch_s``, launch overhead binds; otherwise the slower of the
    two. Raises ``KeyError`` if ``limits`` lacks ``dtype``, unless ``work`` has no FLOPs.
    """
    compute_s = work.flops / limits.flops_per_s[dtype] if work.flops else 0.0
    memory_s = work.bytes / limits.bytes_per_s
    if max(compute_s, memory_s) < launch_s:
        return Bound(LAUNCH, launch_s)
    return Bound(COMPUTE, compute_s) if work.flops and compute_s >= memory_s else Bound(MEMORY, memory_s)
