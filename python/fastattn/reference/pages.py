"""Reads keys and values from the pages of a cache, through a block table."""

from __future__ import annotations

import torch
from torch import Tensor


def present_pages(block_table: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Returns the table clamped to existing pages, int64, and whether each entry is an existing page, bool. Both are
    ``[B, max_pages]``."""
    table = block_table.to(torch.int64)
    return table.clamp(0, max(num_pages - 1, 0)), (table >= 0) & (table < num_pages)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Gathers the pages of ``table [B, max_pages]`` from ``pages [num_pages, H, page_size, …]`` into ``[B, H, max_pages
    * page_size, …]``."""
    if pages.shape[0] == 0:
        return pages.new_zeros(table.shape[0], pages.shape[1], table.shape[1] * pages.shape[2], *pages.shape[3:])
    return pages[table].transpose(1, 2).flatten(2, 3)
