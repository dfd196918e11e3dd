"""What the choice of a backend depends on, and what a choice is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """What the choice of a backend depends on.

    ``sizes``: of attention (batch, heads, KV heads, queries, keys); of decode (rows, bytes of an element, page size or
    0); of int8_matmul (tokens, N, K, group or 0). ``only_torch`` says why no kernel can take the arguments at all.
    ``may_decode``: the mask of this attention means the same to the decoding kernel (a top-left causal mask does not).
    ``may_prefill``: decoding with so many queries that the attention kernel is better at it. ``is_input_gradient``: of
    an int8_matmul only the gradient of its input is computed, for somebody else who differentiates.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    features: frozenset[str]
    sizes: tuple[int, ...] = ()
    only_torch: str | None = None
    may_decode: bool = True
    may_prefill: bool = False
    is_input_gradient: bool = False


@dataclass(frozen=True)
class Choice:
    """Which backend runs a call, its kernel and tile, and why each of the others does not.

    ``detour`` is the reason for which a call on a GPU went to PyTorch although nobody asked for that. ``padded``: the
    head dim and the value head dim to which query, key and value are to be padded, where one of them differs.
    ``decodes``: attention that the decoding kernel computes, with keys and values as its cache. ``prefills``: the
    reverse, decoding whose attention the attention kernel computes, with the cache as pages. ``predicted``:
    microseconds that each way of an int8 matmul is predicted to take, by which the kernel was chosen. ``lacking``: what
    this build or the driver lacks, where Triton runs a call that a CUDA C++ kernel takes.
    """

    backend: str
    kernel: str
    tile: Any = None
    rejected: dict[str, str] = field(default_factory=dict)
    detour: str | None = None
    padded: tuple[int, int] | None = None
    decodes: bool = False
    prefills: bool = False
    predicted: dict[str, float] = field(default_factory=dict)
    lacking: str | None = None
