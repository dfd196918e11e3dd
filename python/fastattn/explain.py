"""Tells which kernel a call would run, and why: ``fastattn.explain()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.checks import type_name
from fastattn.dispatch.reasons import each_once
from fastattn.dispatch.request import Choice
from fastattn.dispatch.thread_state import Explained, explaining
from fastattn.errors import InputError
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.functional.int8_weight import Int8Weight
from fastattn.layout import as_matrix, reason_to_copy


@dataclass(frozen=True)
class Explanation:
    """Names the ``backend``, ``kernel`` and ``tile`` that would run a call.

    ``rejected`` maps each backend that would not run the call to the reason. ``copied`` maps each tensor that would be
    copied first to the reason. With ``key_ranges``, ``computed`` is the fraction of all tiles of scores that
    ``attention`` or ``attention_varlen`` computes, before a causal mask or window removes more tiles. For other calls,
    ``computed`` is None.
    """

    backend: str
    kernel: str
    tile: Any
    rejected: dict[str, str]
    copied: dict[str, str]
    computed: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.kernel}"]
        if self.tile is not None:
            lines.append(f"  tile: {self.tile}")
        if self.computed is not None:
            lines.append(f"  computes {self.computed:.1%} of the tiles")
        lines += [f"  copied first: {name}: {reason}" for name, reason in self.copied.items()]
        lines += [f"  not {backends}: {reason}" for backends, reason in each_once(self.rejected).items()]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Returns which kernel ``function(*args, **kwargs)`` would run, without running it or changing anything.

    ``function`` is a function of fastattn, or a function that calls one. In the second case, ``explain`` runs
    ``function`` up to its first call of fastattn, and explains that call. Bad arguments raise the same error as in the
    call itself. A function that never calls fastattn raises ``TypeError``.
    """
    if not callable(function):
        call = "explain(fastattn.attention, query, key, value)"
        raise InputError(f"function: expected a function and then its arguments, as {call}, got {type_name(function)}")
    try:
        with explaining():
            function(*args, **kwargs)
    except Explained as explained:
        choice = explained.choice
    else:
        name, module = getattr(function, "__name__", None), getattr(function, "__module__", None)
        whole_name = type_name(function) if name is None else f"{module}.{name}" if module else name
        advice = "pass fastattn.attention, or a module that calls it"
        if name == "scaled_dot_product_attention":
            advice = "explain it inside of fastattn.patch_sdpa()"
        came = f"{whole_name} returned without doing so; {advice}"
        raise TypeError(f"function: expected one that calls fastattn, but {came}")
    copied, named = {}, _named_arguments(function, args, kwargs)
    if choice.backend != "torch":
        for name, value in _arguments_read_in_place(named).items():
            tensor = value.int8_data if isinstance(value, Int8Tensor) else value
            tensor = value.data if isinstance(value, Int8Weight) else tensor
            if isinstance(tensor, Tensor) and tensor.layout == torch.jagged:
                tensor = tensor.transpose(1, 2).values()
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                continue
            # The int8 matmul's Triton kernels take x and weight at any address; its CUDA C++ kernels need rows aligned
            # to 16 bytes. Both backends take the residual at any address.
            rows_anywhere = name == "residual" or (name in ("x", "weight") and choice.backend == "triton")
            rows = as_matrix(tensor) if name in ("x", "residual") else tensor
            reason: str | None = "its rows have no common stride"
            if rows is not None:
                reason = _reason_to_pad(tensor, name, choice) or reason_to_copy(rows, rows_anywhere)
            if reason is not None:
                copied[name] = reason
    computed = None
    is_told = function in (attention, attention_varlen) and isinstance(named.get("key_ranges"), Tensor)
    if choice.backend != "torch" and is_told:
        tile = choice.tile if isinstance(choice.tile, dict) else vars(choice.tile)
        computed = _fraction_of_tiles(named, tile["block_m"], tile["block_n"])
    return Explanation(choice.backend, choice.kernel, choice.tile, dict(choice.rejected), copied, computed)


def _fraction_of_tiles(named: dict[str, Any], block_m: int, block_n: int) -> float:
    """Returns the fraction of tiles in which some query's ranges include some key. Copies the ranges to the host."""
    ranges, key = named["key_ranges"].cpu(), named["key"]
    if named.get("cu_seqlens_q") is None:
        sequences = [(ranges, key.shape[-2])]
    else:
        offsets, keys = named["cu_seqlens_q"].tolist(), named["cu_seqlens_k"].diff().tolist()
        sequences = [
            (ranges[:, begin:end], count) for begin, end, count in zip(offsets, offsets[1:], keys, strict=False)
        ]
    computed = total = 0
    for of_sequence, num_keys in sequences:
        first_key = torch.arange(0, num_keys, block_n)
        for rows in of_sequence.split(block_m, dim=-3) if of_sequence.shape[-3] else ():
            begin, end = rows.flatten(-3, -2).unsqueeze(-3).unbind(-1)  # […, 1, rows * R]
            meets = (begin < end) & (begin < first_key[:, None] + block_n) & (end > first_key[:, None])
            computed, total = computed + int(meets.any(-1).sum()), total + meets[..., 0].numel()
    return computed / max(total, 1)


def _reason_to_pad(tensor: Tensor, name: str, choice: Choice) -> str | None:
    """Returns why ``tensor``, the query, key or value, is padded, or None if it is not padded."""
    if choice.padded is None:
        return None
    head_dim, value_dim = choice.padded
    dim = value_dim if name == "value" else head_dim
    return None if tensor.shape[-1] == dim else f"its head dim, {tensor.shape[-1]}, is padded with zeros to {dim}"


def _named_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {}


def _arguments_read_in_place(named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that kernels read in place, or that are copied if their layout does not allow that."""
    pages = () if named.get("block_table") is None else ("key", "value")  # pages are never copied
    tensors = ("query", "key", "value", "k_new", "v_new", "x", "weight", "residual")
    read = [name for name in tensors if name not in pages]
    return {name: named[name] for name in read if name in named}
