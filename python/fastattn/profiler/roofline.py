"""What bounds a kernel: its work against what the machine can do (Williams, Waterman and Patterson, "Roofline", 2009).

Times are in seconds, work in bytes and FLOPs, rates in bytes and FLOPs per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch overhead"


class Work(NamedTuple):
    """What a kernel has to do at the least: floating-point operations, and bytes to and from device memory.

    ``is_upper_bound``: lengths that only the device knows were taken at their largest.
    """

    flops: int
    bytes: int
    is_upper_bound: bool = False

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else float("inf") if self.flops else 0.0


@dataclass(frozen=True)
class Limits:
    """What one machine was seen to do.

    Args:
        bytes_per_s: reads plus writes of a large copy within device memory.
        flops_per_s: dtype (``"bfloat16"``) → a large cuBLAS matmul of random numbers in it.
        eager_launch_s, graph_launch_s: the least time that a kernel takes which does nothing, launched by itself and as
            one node of a CUDA graph.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    eager_launch_s: float
    graph_launch_s: float

    def balance(self, dtype: str) -> float:
        """The arithmetic intensity, in FLOPs per byte, from which on ``dtype`` is bound by compute."""
        return self.flops_per_s[dtype] / self.bytes_per_s


class Bound(NamedTuple):
    """The resource that binds a kernel, and the time below which it cannot come."""

    resource: str
    least_s: float

    def fraction(self, seconds: float) -> float:
        """How near to its limit a kernel came that took ``seconds``: 1 is the limit itself."""
        return self.least_s / seconds


def bound(work: Work, limits: Limits, dtype: str, launch_s: float) -> Bound:
    """Which resource binds ``work`` in ``dtype``.

    Compute or memory by the arithmetic intensity against the machine's balance; launch overhead where either would be
    done before a kernel that does nothing. Raises ``KeyError`` for a dtype without a measured limit.
    """
    compute_s = work.flops / limits.flops_per_s[dtype]
    memory_s = work.bytes / limits.bytes_per_s
    if max(compute_s, memory_s) < launch_s:
        return Bound(LAUNCH, launch_s)
    if work.intensity >= limits.balance(dtype):
        return Bound(COMPUTE, compute_s)
    return Bound(MEMORY, memory_s)
