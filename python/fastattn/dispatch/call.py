"""The description of a call by which a backend is chosen, and the choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """Everything about a call on which the choice of a backend depends.

    Attributes:
        sizes: for attention (batch, heads, KV heads, queries, keys); for decode (rows, bytes of a cached element, page
            size or 0); for int8_matmul (tokens, N, K, group or 0).
        only_torch: why no kernel can take the arguments at all, or None.
        may_decode: whether the decoding kernel would apply the mask of this attention in the same way (not a causal
            mask that is aligned to the top left).
        may_prefill: whether this is decoding with so many queries that the attention kernel is the better one.
        is_input_gradient: whether only the gradient of an int8_matmul's input is computed, for a caller that
            differentiates by itself.
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
    """The backend that runs a call, with its kernel and tile, and why each of the others does not.

    Attributes:
        detour: why a call on a GPU goes to PyTorch although nobody asked for that, or None.
        padded: the head dim and the value head dim to which query, key and value must be padded, or None.
        decodes: whether the decoding kernel computes this attention, with keys and values as its cache.
        prefills: whether the attention kernel computes this decoding, with the cache as its pages.
        lacking: what this build or the driver lacks, if Triton runs a call that a CUDA C++ kernel could take.
    """

    backend: str
    kernel: str
    tile: Any = None
    rejected: dict[str, str] = field(default_factory=dict)
    detour: str | None = None
    padded: tuple[int, int] | None = None
    decodes: bool = False
    prefills: bool = False
    lacking: str | None = None
