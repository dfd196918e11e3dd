"""Computes elementary functions in kernels, without libdevice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Returns tanh(x), accurate to a few ulp: a Taylor polynomial near 0, where the exponential form would cancel."""
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0.0, -far, far))
