"""Judges results by their error against float64. An implementation is timed only if its result is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A peer may round more than fastattn may (activations to int8, probabilities to 16 bits). If its error exceeds
# this fraction of the largest value, the peer computes another function.
LOOSE = 0.05


class Expected(NamedTuple):
    """Holds the float64 results, and the largest error that fastattn may have in each."""

    oracle: tuple[Tensor, ...]
    bounds: tuple[float, ...]

    @classmethod
    def from_composite(cls, oracle: Sequence[Tensor], composite: Sequence[Tensor], dtype: torch.dtype) -> Expected:
        """Sets each bound to twice the worst error of PyTorch's computation in ``dtype``, plus one rounding."""
        bounds = (
            2 * worst_difference(inexact, exact) + torch.finfo(dtype).eps / 2 * exact.abs().max().item()
            for exact, inexact in zip(oracle, composite, strict=True)
        )
        return cls(tuple(oracle), tuple(bounds))


class Verdict(NamedTuple):
    """Holds a result's worst error, relative to its tensor's largest value, and why the result fails, or None."""

    error: float
    reason: str | None


def worst_difference(actual: Tensor, oracle: Tensor) -> float:
    """Returns the largest absolute difference, or infinity if a difference is not finite or the shapes differ."""
    if actual.shape != oracle.shape:
        return math.inf
    worst = (actual.double() - oracle).abs().max().item() if actual.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf


def judge(actual: Sequence[Tensor], expected: Expected, is_peer: bool) -> Verdict:
    """Judges all outputs of a call. Peers have a loose bound, because their error is shown with their time."""
    largest_error, reason = 0.0, None
    for index, (result, oracle, strict) in enumerate(zip(actual, expected.oracle, expected.bounds, strict=True)):
        difference = worst_difference(result, oracle)
        largest = oracle.abs().max().item() or 1.0
        allowed = LOOSE * largest if is_peer else strict
        if difference > allowed and reason is None:
            reason = f"output {index}: worst error {difference:.3e} exceeds {allowed:.3e}"
        largest_error = max(largest_error, difference / largest)
    return Verdict(largest_error, reason)
