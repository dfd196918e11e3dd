"""Counts the floating-point operations of an operation's matrix products: multiplications and additions."""

from __future__ import annotations


def attention_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Counts Q K^T and P V over ``pairs`` of a query and a key, counted over the batch and all query heads."""
    return 2 * pairs * (head_dim + value_dim)


def attention_backward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Counts Q K^T, dS^T Q and dS K with the query's head dim, and dO V^T and P^T dO with the value head dim."""
    return 2 * pairs * (3 * head_dim + 2 * value_dim)


def matmul_flops(rows: int, columns: int, depth: int) -> int:
    """Counts the product of ``[rows, depth]`` and ``[depth, columns]``."""
    return 2 * rows * columns * depth
