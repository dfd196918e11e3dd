"""Small Triton kernels that know nothing of the package, for test_emulator_triton.py. Not a test module."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    SUM: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """``c[M, N] = a[M, K] @ b[K, N]``; a and c are contiguous."""
    rows = tl.program_id(0) * M_BLOCK + tl.arange(0, M_BLOCK)
    columns = tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    total = tl.zeros((M_BLOCK, N_BLOCK), SUM)
    for start in range(0, K, K_BLOCK):
        depth = start + tl.arange(0, K_BLOCK)
        x = tl.load(a + rows[:, None] * K + depth, mask=(rows[:, None] < M) & (depth < K), other=0)
        y = tl.load(
            b + depth[:, None] * stride_bk + columns * stride_bn, mask=(depth[:, None] < K) & (columns < N), other=0
        )
        total = tl.dot(x, y, total, out_dtype=SUM)
    tl.store(c + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


@triton.jit
def histogram_kernel(values, counts, SIZE, BLOCK: tl.constexpr):
    """Counts of each value, by atomic additions."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + place, mask=place < SIZE, other=0)
    tl.atomic_add(counts + found, 1, mask=place < SIZE)
