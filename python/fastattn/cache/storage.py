"""Allocates and copies the memory of one layer of a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.checks import (
    check_bool,
    check_choice,
    check_int,
    check_rank,
    check_shape,
    check_tensor,
    check_torch_dtype,
    checked_device,
    expect,
    shown,
)
from fastattn.errors import InputError
from fastattn.functional.autocast import autocast_dtype
from fastattn.layout import ALIGNMENT_BYTES
from fastattn.quantization import FP8, as_numbers

QUANTIZED = {"int8": torch.int8, "fp8": FP8}


def zeros_in_aligned_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros ``[…, D]`` whose rows are aligned for the kernels' vector loads.

    The allocation leaves inference mode, because tensors of inference mode cannot be written outside of that mode.
    """
    *outer, dim = shape
    unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    with torch.inference_mode(False):
        return torch.zeros(*outer, -(-dim // unit) * unit, dtype=dtype, device=device)[..., :dim]


@dataclass(frozen=True)
class CacheLayout:
    """Holds the format of a layer's tokens. ``dtype`` is the dtype of the queries and, if the cache is not quantized,
    of the cache."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    quantized: torch.dtype | None  # int8 or fp8, or None if the cache is not quantized

    @classmethod
    def checked(
        cls,
        kv_heads: Any,
        head_dim: Any,
        value_dim: Any,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        quantized: Any,
    ) -> CacheLayout:
        """Makes a layout from a constructor's arguments. Raises InputError, TypeError."""
        value_dim = head_dim if value_dim is None else value_dim
        for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim)):
            check_int(name, size, minimum=1)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_torch_dtype(dtype)
        return cls(kv_heads, head_dim, value_dim, dtype, checked_device(device), _stored_as(quantized))

    def check_new(self, batch: int, query: Tensor, k_new: Tensor, v_new: Tensor) -> int:
        """Checks the tensors that ``attend`` gets for a batch of ``batch``, and returns the number of new tokens per
        row."""
        for name, tensor in (("query", query), ("k_new", k_new), ("v_new", v_new)):
            check_tensor(name, tensor)
        check_rank("k_new", k_new, "[B, Hkv, S_new, D]")
        expected = f"{batch} as first dimension, one row per sequence"
        expect(tuple(query.shape[:1]) == (batch,), "query", expected, list(query.shape))
        self.check_query(query)
        if k_new.shape[1] != self.kv_heads != k_new.shape[2]:  # otherwise a later check may advise to swap them
            shape = (batch, self.kv_heads, k_new.shape[2], self.head_dim)
            advice = f"; the cache was made with kv_heads={self.kv_heads}, head_dim={self.head_dim}"
            check_shape("k_new", k_new, shape, "[B, Hkv, S_new, D]", advice)
        return k_new.shape[2]

    def check_query(self, query: Tensor) -> None:
        """Checks the query's head dim and, if the cache is not quantized, its dtype under autocast."""
        expected = f"the cache's head_dim {self.head_dim} as last dimension"
        expect(query.shape[-1] == self.head_dim, "query", expected, list(query.shape))
        cast = autocast_dtype(query.device.type)
        dtype = query.dtype if cast is None or query.dtype == torch.float64 else cast
        if self.quantized is None and dtype != self.dtype:
            raise InputError(
                f"query: expected the cache's dtype, {self.dtype}, got {dtype}; cast it, or make the cache with "
                f"dtype={dtype}"
            )

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.quantized or self.dtype

    def describe(self) -> str:
        """Returns the text for a cache's ``repr``."""
        kind = str(self.stored_dtype).removeprefix("torch.")
        dims = f"head_dim={self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f", value_dim={self.value_dim}"
        return f"kv_heads={self.kv_heads}, {dims}, {kind} on {self.device}"


def _stored_as(quantized: Any) -> torch.dtype | None:
    """Returns the 8-bit dtype that the argument ``quantized`` asks for, or None. Raises InputError, TypeError."""
    if isinstance(quantized, (str, torch.dtype)):
        check_choice("quantized", quantized, (False, True, *QUANTIZED, *QUANTIZED.values()))
        return quantized if isinstance(quantized, torch.dtype) else QUANTIZED[quantized]
    try:
        return torch.int8 if check_bool("quantized", quantized) else None
    except TypeError:
        expected = f"a bool, {', '.join(map(repr, QUANTIZED))} or one of their dtypes"
        raise TypeError(f"quantized: expected {expected}, got {shown(quantized)}") from None


@dataclass
class LayerStorage:
    """Holds a layer's keys ``[blocks, Hkv, rows, D]`` and values ``[blocks, Hkv, rows, Dv]``, and the scales of 8-bit
    keys and values, ``[blocks, Hkv, rows]``. A block is a sequence of a ``KVCache``, or a page of a
    ``PagedKVCache``."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @classmethod
    def allocate(cls, layout: CacheLayout, blocks: int, rows: int) -> LayerStorage:
        """Returns storage of zeros, with scales of 1 if the layout is 8-bit."""
        shape = (blocks, layout.kv_heads, rows)
        k, v = (
            zeros_in_aligned_rows((*shape, dim), layout.stored_dtype, layout.device)
            for dim in (layout.head_dim, layout.value_dim)
        )
        if layout.quantized is None:
            return cls(k, v, None, None)
        with torch.inference_mode(False):
            k_scale, v_scale = (torch.ones(shape, dtype=torch.float32, device=layout.device) for _ in range(2))
        return cls(k, v, k_scale, v_scale)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors that are not None; their first dimension is the block, the third the row."""
        return tuple(t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None)

    def arguments(self) -> dict[str, Any]:
        """Returns the tensors as arguments of ``attention_with_kv_cache``."""
        return {"k_cache": self.k, "v_cache": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def copy_rows(self, other: LayerStorage, rows: int) -> None:
        """Copies the first ``rows`` rows of every block of ``other``."""
        for mine, others in zip(self.tensors(), other.tensors(), strict=True):
            mine[:, :, :rows].copy_(others[:, :, :rows])

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks ``sources`` to blocks ``targets``, int64 ``[n]``; no target is a source."""
        for tensor in self.tensors():
            numbers = as_numbers(tensor)
            numbers.index_copy_(0, targets, numbers.index_select(0, sources))

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors())
