"""Defines the activations that ``int8_linear`` can apply to the product of ``x`` and the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def _swiglu(x: Tensor) -> Tensor:
    """Returns SwiGLU, ``silu(gate) * up [..., N]``, where ``gate`` and ``up`` are the halves of ``x [..., 2 * N]``
    (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    gate, up = x.chunk(2, dim=-1)
    if x.is_nested:  # few operators take views of strided nested tensors
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
# Gated activations combine two columns into one, so the result has half as many columns as the weight has rows.
GATED = frozenset({"swiglu"})


def result_columns(activation: str | None, weight_rows: int) -> int:
    """Returns the number of result columns of ``int8_linear`` with ``activation``."""
    return weight_rows // 2 if activation in GATED else weight_rows
