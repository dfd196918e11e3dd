"""How many floating-point operations the matrix products of an operation take: multiplications and additions."""

from __future__ import annotations


def attention_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Q K^T and P V over ``pairs`` of a query and a key."""
    return 2 * pairs * (head_dim + value_dim)


def attention_backward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Q K^T, dS^T Q, dS K have the query's head dim; dO V^T, P^T dO have the value's."""
    return 2 * pairs * (3 * head_dim + 2 * value_dim)


def matmul_flops(rows: int, columns: int, depth: int) -> int:
    """Of a result ``[rows, columns]``, whose elements are sums of ``depth`` products."""
    return 2 * rows * columns * depth
