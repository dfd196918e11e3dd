"""Small Triton kernels that do not use the package, for test_triton.py. Not a test module."""

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
    DOUBLE: tl.constexpr = False,
):
    """Computes ``c[M, N] = a[M, K] @ b[K, N]``; with DOUBLE, of 2a from registers. a and c are contiguous."""
    rows = tl.program_id(0) * M_BLOCK + tl.arange(0, M_BLOCK)
    columns = tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    total = tl.zeros((M_BLOCK, N_BLOCK), SUM)
    for start in range(0, K, K_BLOCK):
        depth = start + tl.arange(0, K_BLOCK)
        x = tl.load(a + rows[:, None] * K + depth, mask=(rows[:, None] < M) & (depth < K), other=0.0)
        y = tl.load(
            b + depth[:, None] * stride_bk + columns * stride_bn, mask=(depth[:, None] < K) & (columns < N), other=0.0
        )
        if DOUBLE:
            x = x * 2
        total = tl.dot(x, y, total, out_dtype=SUM)
    tl.store(c + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


@triton.jit
def described_matmul_kernel(a, b, c, K, M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """Computes ``c = a @ b^T`` with tensor descriptors of the host."""
    row, column = tl.program_id(0) * M_BLOCK, tl.program_id(1) * N_BLOCK
    total = tl.zeros((M_BLOCK, N_BLOCK), tl.float32)
    for start in range(0, K, K_BLOCK):
        total = tl.dot(a.load([row, start]), b.load([column, start]).T, total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def describing_matmul_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    """Computes ``c = a @ b^T`` with descriptors that the kernel makes, and with specialised warps if SPECIALISED."""
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [M_BLOCK, K_BLOCK])
    of_b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [N_BLOCK, K_BLOCK])
    of_c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [M_BLOCK, N_BLOCK])
    row, column = tl.program_id(0) * M_BLOCK, tl.program_id(1) * N_BLOCK
    total = tl.zeros((M_BLOCK, N_BLOCK), tl.float32)
    for start in tl.range(0, K, K_BLOCK, warp_specialize=SPECIALISED):
        total = tl.dot(of_a.load([row, start]), of_b.load([column, start]).T, total)
    of_c.store([row, column], total.to(c.dtype.element_ty))


@triton.jit
def softmax_kernel(x, out, COLUMNS, BLOCK: tl.constexpr):
    """Computes the softmax of one row per program."""
    column = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * COLUMNS + column, mask=column < COLUMNS, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * COLUMNS + column, exponential / tl.sum(exponential, 0), mask=column < COLUMNS)


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def reductions_kernel(x, sums, largest, where, running, order, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes reductions along both dimensions, a scan, and a sort."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = row[:, None] * COLUMNS + column
    tile = tl.load(x + place)
    tl.store(sums + column, tl.reduce(tile, 0, add))
    value, index = tl.max(tile, 1, return_indices=True)
    tl.store(largest + row, value)
    tl.store(where + row, index)
    tl.store(running + place, tl.associative_scan(tile, 1, add))
    tl.store(order + place, tl.sort(tile, 1))


@triton.jit
def histogram_kernel(values, counts, SIZE, BLOCK: tl.constexpr):
    """Counts each value by atomic additions."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + place, mask=place < SIZE, other=0)
    tl.atomic_add(counts + found, 1, mask=place < SIZE)


@triton.jit
def atomics_kernel(x, total, total16, largest, lock, guarded, BLOCK: tl.constexpr):
    """Computes sums in fp32 and fp16, a maximum, and a sum under a lock."""
    tile = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(total + tl.arange(0, BLOCK), tile)
    tl.atomic_add(total16 + tl.arange(0, BLOCK), tile.to(tl.float16))
    tl.atomic_max(largest, tl.max(tile, 0))
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(guarded, tl.load(guarded) + tl.sum(tile, 0))
    tl.atomic_xchg(lock, 0)


@triton.jit
def arguments_kernel(
    out, pair, nothing, wide, flag, half: tl.float16, brain: tl.bfloat16, double: tl.float64, FACTOR: tl.constexpr
):
    """Takes every kind of argument, and stores each of them."""
    tl.store(out, tl.load(pair[0]))
    tl.store(out + 1, pair[1].to(tl.float64))
    tl.store(out + 2, 1.0 if nothing is None else 0.0)
    tl.store(out + 3, (wide >> 32).to(tl.float64))
    tl.store(out + 4, flag.to(tl.float64))
    tl.store(out + 5, half.to(tl.float64))
    tl.store(out + 6, brain.to(tl.float64))
    tl.store(out + 7, double)
    tl.store(out + 8, FACTOR)
    tl.store(out + 9, tl.num_programs(0).to(tl.float64))


@triton.autotune(
    [triton.Config({"BLOCK": 32}, num_warps=1), triton.Config({"BLOCK": 64}, num_warps=2)],
    key=["SIZE"],
    reset_to_zero=["out"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["SIZE"] % 2 == 0})
@triton.jit
def tuned_kernel(out, SIZE, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Adds its block size to every element."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + place, BLOCK + EVEN * 1000, mask=place < SIZE)
