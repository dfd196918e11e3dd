"""Lists the activations that a matmul can end with."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def _swiglu(x: Tensor) -> Tensor:
    """Returns ``silu(gate) * up`` of the first and the second half of ``x``: SwiGLU of Shazeer, "GLU Variants Improve
    Transformer"."""
    gate, up = x.chunk(2, dim=-1)
    if x.is_nested:  # strided nested tensors have few operators on views
        gate, up = gate.contiguous(), up.contiguous()
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": _swiglu,
}
# Gated activations make one number of two, so the result has half as many columns as the weight has rows.
GATED = frozenset({"swiglu"})


def result_columns(activation: str | None, weight_rows: int) -> int:
    """Returns the number of columns of the result of a matmul that ends with ``activation``."""
    return weight_rows // 2 if activation in GATED else weight_rows
