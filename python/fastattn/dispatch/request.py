"""Defines ``Op``, an operation; ``Request``, its description of a call; and ``Choice``, the dispatcher's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastattn.dispatch.device import DeviceFacts


@dataclass(frozen=True, eq=False)
class Op:
    """Describes an operation to the dispatcher; ``ops.describe`` defines all of them.

    Attributes:
        name: the operation's name in the tables of support.py.
        kernel: returns the name and the tile of the backend's kernel for a request.
        refusal: returns a reason against a backend that the tables of support.py do not express, or None.
        instead: returns an equivalent request of another operation whose kernel suits the call better, or None.
        has_torch_sdpa: whether ``torch.nn.attention.sdpa_kernel`` sends its calls to PyTorch.
    """

    name: str
    kernel: Callable[[str, Request, DeviceFacts], tuple[str, Any]]
    refusal: Callable[[str, Request, DeviceFacts], str | None] = lambda backend, request, facts: None
    instead: Callable[[Request], Request | None] = lambda request: None
    has_torch_sdpa: bool = False


class Request(NamedTuple):
    """Holds everything about a call on which the choice of a backend depends.

    ``details`` holds what only the functions of ``op`` read, such as sizes. ``only_torch`` says why no kernel can take
    the arguments at all, or is None.
    """

    op: Op
    device: torch.device
    dtype: torch.dtype
    features: frozenset[str] = frozenset()
    head_dim: int = 0
    value_dim: int = 0
    details: Any = None
    only_torch: str | None = None


@dataclass(frozen=True)
class Choice:
    """Names the backend that runs a call, with its kernel and tile, and says why every other backend does not.

    Attributes:
        op: the operation that the kernel belongs to; it may differ from the call's.
        detour: why a call on a GPU goes to PyTorch although nobody asked for that, or None.
        padded: the head dim and the value head dim to which query, key and value must be padded, or None.
        lacking: what this build or the driver lacks, if Triton runs a call that a CUDA C++ kernel could take.
    """

    backend: str
    kernel: str
    op: Op
    tile: Any = None
    rejected: dict[str, str] = field(default_factory=dict)
    detour: str | None = None
    padded: tuple[int, int] | None = None
    lacking: str | None = None
