"""Counts the FLOPs and bytes that each operation needs at least, from its shapes.

FLOPs count multiplications and additions of the matrix products. Masked pairs do not count; a causal mask over as many
queries as keys counts one half, the convention of the FlashAttention papers. Bytes count every input and every output
once, as if each stayed in the L2 cache between its uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fastattn.ops.flops import attention_backward_flops, attention_flops, matmul_flops

LSE_BYTES = 4  # float32


class Work(NamedTuple):
    """Holds the least work of a kernel: floating-point operations, and bytes to and from device memory.

    ``is_upper_bound`` says that lengths that only the device knows were counted at their largest.
    """

    flops: int
    bytes: int
    is_upper_bound: bool = False

    @property
    def intensity(self) -> float:
        """Returns the FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else float("inf") if self.flops else 0.0


def visible_pairs(
    seqlen_q: int, seqlen_k: int, window_left: int = -1, window_right: int = -1, offset: int | None = None
) -> int:
    """Returns the number of pairs of a query and a key that the query sees. -1 makes a side of the window unbounded.

    Query ``i`` is at key position ``i + offset``. If ``offset`` is None, the last query is at the last key.
    """
    if window_left < 0 and window_right < 0:
        return seqlen_q * seqlen_k
    if offset is None:
        offset = seqlen_k - seqlen_q
    if window_left < 0 and window_right == 0 and seqlen_q == seqlen_k and offset == 0:
        return seqlen_q * seqlen_k // 2
    total = seqlen_q * seqlen_k
    if window_right >= 0:
        total = _keys_before(seqlen_q, seqlen_k, offset + window_right + 1)
    if window_left >= 0:
        total -= _keys_before(seqlen_q, seqlen_k, offset - window_left)
    return total


def _keys_before(seqlen_q: int, seqlen_k: int, first: int) -> int:
    """Returns the sum over queries ``i`` of the number of keys before key ``first + i``."""
    growing_from = min(max(-first, 0), seqlen_q)
    full_from = min(max(seqlen_k - first, 0), seqlen_q)
    growing = full_from - growing_from
    return growing * (first + growing_from) + growing * (growing - 1) // 2 + (seqlen_q - full_from) * seqlen_k


def attention_forward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], itemsize: int, pairs: int, bias_bytes: int = 0
) -> Work:
    """Returns the work of the forward pass over dense or packed shapes.

    ``pairs`` is the result of ``visible_pairs``, summed over all batch entries and query heads.
    """
    out = math.prod(query[:-1])
    return Work(
        attention_flops(pairs, key[-1], value[-1]),
        (_elements(query, key, value) + out * value[-1]) * itemsize + out * LSE_BYTES + bias_bytes,
    )


def attention_backward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], itemsize: int, pairs: int, bias_bytes: int = 0
) -> Work:
    """Returns the work of the gradients' five products, with the arguments of ``attention_forward``.

    The bytes are those of the forward pass's inputs and results, ``grad_out`` and the gradients of the inputs.
    """
    rows = math.prod(query[:-1])
    read_and_written = 2 * _elements(query, key, value) + 2 * rows * value[-1]
    return Work(
        attention_backward_flops(pairs, key[-1], value[-1]),
        read_and_written * itemsize + rows * LSE_BYTES + bias_bytes,
    )


def attention_decode(
    query: Sequence[int],
    kv_heads: int,
    value_dim: int,
    total_tokens: int,
    itemsize: int,
    cache_itemsize: int,
    scales: bool = False,
) -> Work:
    """Returns the work of ``query [B, Hq, Sq, D]`` over ``total_tokens`` cached tokens of all sequences.

    With ``scales``, each token of each KV head has a float32 scale for its key and another for its value.
    """
    batch, heads, num_queries, head_dim = query
    rows = batch * heads * num_queries
    token_bytes = kv_heads * ((head_dim + value_dim) * cache_itemsize + (8 if scales else 0))
    return Work(
        attention_flops(heads * num_queries * total_tokens, head_dim, value_dim),
        total_tokens * token_bytes + rows * (head_dim + value_dim) * itemsize + rows * LSE_BYTES,
    )


def int8_matmul(
    m: int, n: int, k: int, itemsize: int, num_scales: int, extra_elements: int = 0, columns: int | None = None
) -> Work:
    """Returns the work of ``[m, k] x [n, k]^T`` with int8 weights. The input gradient has the same work.

    ``extra_elements`` counts the elements of bias and residual. ``columns`` is the number of columns of the result,
    if not ``n``: SwiGLU halves it.
    """
    elements = m * (k + (n if columns is None else columns)) + extra_elements
    return Work(matmul_flops(m, n, k), elements * itemsize + n * k + 4 * num_scales)


def _elements(*shapes: Sequence[int]) -> int:
    return sum(math.prod(shape) for shape in shapes)
