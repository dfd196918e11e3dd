"""Computes which attention weights dropout keeps. The random numbers depend only on the seed and the position."""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns four random words by Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1,
    2, 3", SC 2011, section 3.3).

    Arguments and results are int64 tensors of 32-bit words. The arguments broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps to the low 64 bits
        high0, high1 = (product0 >> 32) & MASK32, (product1 >> 32) & MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & MASK32, high0 ^ c3 ^ k1, product0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def dropout_keep(
    seed: int | Tensor,
    p: float,
    batch: int,
    heads: int,
    rows: int,
    columns: int,
    device: torch.device,
    origin: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Returns which probabilities dropout keeps, bool ``[batch, heads, rows, columns]``.

    ``origin`` is the position of the first row, column and head in the larger call that contains this block.
    """
    first_row, first_column, first_head = origin
    skipped = first_column % 4  # how many of the first four words are for earlier columns
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device).reshape(())
    head = first_head + torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row = first_row + torch.arange(rows, device=device).view(1, 1, rows, 1)
    block = first_column // 4 + torch.arange((skipped + columns + 3) // 4, device=device).view(1, 1, 1, -1)
    words = philox_4x32((block, row, head, torch.zeros_like(block)), (seed & MASK32, (seed >> 32) & MASK32))
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., skipped : skipped + columns]
    return word >= int(p * 2**32)
