"""Defines the cases that are measured: their sizes, inputs, expected results, and the least work of a call."""

from __future__ import annotations

import random

import torch


class OfDtype:
    """Gives cases ``torch_dtype``, the torch dtype that their field ``dtype`` names."""

    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def lengths_up_to(longest: int, batch: int) -> tuple[int, ...]:
    """Returns lengths of sequences: ``longest`` first, then random ones, ``longest`` / 8 to ``longest``."""
    draw = random.Random(f"{longest} {batch}")
    return (longest, *(draw.randint(max(longest // 8, 1), longest) for _ in range(batch - 1)))
