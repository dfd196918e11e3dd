"""Draws calls of ``attention_varlen`` over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_cases import offsets
from kernel_device import DEVICE

HUGE = 2**31 - 1
CAUSAL = (-1, 0)
GARBAGE = (HUGE, -7, -HUGE - 1)


@dataclass(frozen=True)
class Case:
    """One call. Pages of no sequence and rows without a key hold NaN; unused table entries are out of range."""

    page_size: int = 16
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((5, 0, 37, 1, 20), (40, 7, 101, 0, 13))
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.float16
    options: tuple[tuple[str, Any], ...] = (("window", CAUSAL),)
    alibi: bool = False
    sinks: bool = False
    shared_pages: int = 0  # the first pages of every sequence are those of the sequence before

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Case(), name)}
        return ",".join(f"{name}={value}".replace(" ", "").replace("torch.", "") for name, value in changed.items())


def make(case: Case) -> dict[str, Any]:
    """Returns the arguments of ``attention_varlen``."""
    generator = torch.Generator().manual_seed(case.page_size + case.dims[0])
    (heads, kv_heads), (head_dim, value_dim) = case.heads, case.dims
    lengths_q, lengths_k = case.lengths
    batch = len(lengths_q)
    used = [-(-length // case.page_size) for length in lengths_k]
    width = max(used, default=0) + 2
    order = torch.randperm(sum(used) + 3, generator=generator).tolist()  # three pages belong to no sequence
    table = torch.tensor(GARBAGE).repeat(batch, width)[:, :width].contiguous()
    key = torch.full((len(order), kv_heads, case.page_size, head_dim), torch.nan)
    value = torch.full((len(order), kv_heads, case.page_size, value_dim), torch.nan)
    for sequence, length in enumerate(lengths_k):
        for index in range(used[sequence]):
            rows = min(case.page_size, length - index * case.page_size)
            if index < case.shared_pages and sequence > 0 and rows == case.page_size <= lengths_k[sequence - 1]:
                table[sequence, index] = table[sequence - 1, index]
                continue
            table[sequence, index] = page = order.pop()
            key[page, :, :rows] = torch.randn(kv_heads, rows, head_dim, generator=generator)
            value[page, :, :rows] = torch.randn(kv_heads, rows, value_dim, generator=generator)
    arguments: dict[str, Any] = {
        "query": torch.randn(sum(lengths_q), heads, head_dim, generator=generator).to(case.dtype),
        "key": key.to(case.dtype),
        "value": value.to(case.dtype),
        "cu_seqlens_q": offsets(lengths_q),
        "cu_seqlens_k": offsets(lengths_k) + 1000,  # only differences count
        "max_seqlen_q": max(lengths_q, default=0),
        "max_seqlen_k": max(lengths_k, default=0),
        "block_table": table.to(torch.int32),
        **dict(case.options),
    }
    if case.alibi:
        arguments["alibi_slopes"] = torch.rand(batch, heads, generator=generator)
    if case.sinks:
        arguments["sinks"] = torch.randn(heads, generator=generator)
    if "dropout_p" in arguments:
        arguments["dropout_seed"] = 12345
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in arguments.items()}
