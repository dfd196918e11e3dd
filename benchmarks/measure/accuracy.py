"""Whether a result may be timed: its error against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A peer may round more than we allow ourselves (activations to int8, probabilities to 16 bits): beyond this part of the
# largest value its result is another function's.
LOOSE = 0.05


class Expected(NamedTuple):
    """The float64 results, and how far from each fastattn may be."""

    oracle: tuple[Tensor, ...]
    bounds: tuple[float, ...]

    @classmethod
    def from_composite(cls, oracle: Sequence[Tensor], composite: Sequence[Tensor], dtype: torch.dtype) -> Expected:
        """Twice the worst error of PyTorch's own computation in ``dtype``, plus one rounding of the result."""
        bounds = (
            2 * worst_difference(inexact, exact) + torch.finfo(dtype).eps / 2 * exact.abs().max().item()
            for exact, inexact in zip(oracle, composite, strict=True)
        )
        return cls(tuple(oracle), tuple(bounds))


class Verdict(NamedTuple):
    """``error``: the worst difference, relative to the largest value of its tensor; ``reason``: None if it passes."""

    error: float
    reason: str | None


def worst_difference(actual: Tensor, oracle: Tensor) -> float:
    """The largest absolute difference; infinite where anything is not finite or a shape is another."""
    if actual.shape != oracle.shape:
        return math.inf
    worst = (actual.double() - oracle).abs().max().item() if actual.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf


def judge(actual: Sequence[Tensor], expected: Expected, is_peer: bool) -> Verdict:
    """Peers are held to a loose bound: their error is told beside their time."""
    largest_error, reason = 0.0, None
    for index, (result, oracle, strict) in enumerate(zip(actual, expected.oracle, expected.bounds, strict=True)):
        difference = worst_difference(result, oracle)
        largest = oracle.abs().max().item() or 1.0
        allowed = LOOSE * largest if is_peer else strict
        if difference > allowed and reason is None:
            reason = f"output {index}: worst error {difference:.3e} exceeds {allowed:.3e}"
        largest_error = max(largest_error, difference / largest)
    return Verdict(largest_error, reason)
