"""FLOP counts for ``torch.utils.flop_counter``.

As torch counts its own attention: every pair of query and key, masked or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def forward_matmul_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Q K^T and P V over ``pairs`` of a query and a key."""
    return 2 * pairs * (head_dim + value_dim)


def backward_matmul_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """Q K^T, dS^T Q, dS K have the query's head dim; dO V^T, P^T dO have the value's."""
    return 2 * pairs * (3 * head_dim + 2 * value_dim)


def _all_pairs(query: Sequence[int], key: Sequence[int], max_seqlen_k: int) -> int:
    return query[0] * query[1] * (query[2] * key[2] if len(query) == 4 else max_seqlen_k)


def forward_flops(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return forward_matmul_flops(_all_pairs(query, key, args[7]), key[-1], value[-1])


def backward_flops(grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return backward_matmul_flops(_all_pairs(query, key, args[9]), key[-1], value[-1])


def decode_flops(query: Any, k_cache: Any, v_cache: Any, *args: Any, **kwargs: Any) -> int:
    capacity = k_cache[2] if args[6] is None else args[6][1] * k_cache[2]
    return 2 * query[0] * query[1] * query[2] * capacity * (k_cache[-1] + v_cache[-1])


def matmul_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    rows = 1
    for dim in x[:-1]:
        rows *= dim
    return 2 * rows * weight[0] * weight[1]
