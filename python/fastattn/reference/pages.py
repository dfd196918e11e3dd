"""Keys and values that lie in the pages of a cache, read through a block table."""

from __future__ import annotations

import torch
from torch import Tensor


def present_pages(block_table: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Returns the table with entries clamped to existing pages, int64, and which entries exist, both ``[B,
    max_pages]``."""
    table = block_table.to(torch.int64)
    return table.clamp(0, max(num_pages - 1, 0)), (table >= 0) & (table < num_pages)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Gathers from ``pages [num_pages, H, page_size, …]`` those of ``table [B, max_pages]``, as ``[B, H, max_pages *
    page_size, …]``."""
    if pages.shape[0] == 0:
        return pages.new_zeros(table.shape[0], pages.shape[1], table.shape[1] * pages.shape[2], *pages.shape[3:])
    return pages[table].transpose(1, 2).flatten(2, 3)
