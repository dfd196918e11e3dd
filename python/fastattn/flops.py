"""FLOP counts for ``torch.utils.flop_counter``.

As torch counts its own attention: every pair of query and key, masked or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], args: tuple[Any, ...]) -> int:
    pairs = query[0] * query[1] * query[2] * key[2] if len(query) == 4 else query[0] * query[1] * args[7]
    return 2 * pairs * (key[-1] + value[-1])


def forward_flops(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _attention_flops(query, key, value, args)


def backward_flops(grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # Q K^T, dS^T Q, dS K have the query's head dim; dO V^T, P^T dO have the value's. The forward has one of each.
    forward = _attention_flops(query, key, value, args[2:])
    return forward * (3 * key[-1] + 2 * value[-1]) // max(key[-1] + value[-1], 1)


def decode_flops(query: Any, k_cache: Any, v_cache: Any, *args: Any, **kwargs: Any) -> int:
    capacity = k_cache[2] if args[6] is None else args[6][1] * k_cache[2]
    return 2 * query[0] * query[1] * query[2] * capacity * (k_cache[-1] + v_cache[-1])


def matmul_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    rows = 1
    for dim in x[:-1]:
        rows *= dim
    return 2 * rows * weight[0] * weight[1]
