"""Defines a function with the signature of ``torch.nn.attention.varlen.varlen_attn``, for every supported torch.

fastattn computes its gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.checks import check_rank, check_tensor
from fastattn.errors import InputError
from fastattn.functional.attention import attention_varlen
from fastattn.integrations.argument_names import errors_name
from fastattn.integrations.torch_flash.operators import packed_keys


@errors_name(
    cum_seq_q="cu_seq_q",
    cum_seq_k="cu_seq_k",
    cu_seqlens_q="cu_seq_q",
    cu_seqlens_k="cu_seq_k",
    max_seqlen_q="max_q",
    max_seqlen_k="max_k",
    window="window_size",
)
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attends over packed sequences; a causal mask is ``window_size=(-1, 0)``.

    Args:
        query: ``[total_q, Hq, D]``.
        key, value: ``[total_k, Hkv, D]``, or with a ``block_table`` pages ``[num_pages, page_size, Hkv, D]`` of any
            size.
        cu_seq_q, cu_seq_k: int32 ``[B + 1]``. ``cu_seq_k`` can be None if ``seqused_k`` and ``block_table`` are given.
        return_aux: ``torch.nn.attention.varlen.AuxRequest``: with ``lse=True`` the lse is returned, too.
        enable_gqa: whether Hkv may be less than Hq.
        seqused_k: int32 ``[B]``: the number of keys used at the beginning of each sequence. Without a ``block_table``
            the call copies the keys, and is differentiable.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence.
        num_splits: 1 gives a sequence the same bits whatever else is in the batch; other numbers have no effect.

    Returns:
        ``[total_q, Hq, D]``, and with ``return_aux`` the lse, float32 ``[Hq, total_q]``, as in torch.

    Raises:
        InputError, TypeError: an argument is wrong, as far as the host can tell.
    """
    check_tensor("query", query)
    check_rank("query", query, "[total_q, Hq, D]")
    key, value, packed = packed_keys(key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise InputError(f"key: expected the query's {heads} heads, got {kv_heads}; fewer need enable_gqa=True")
    return attention_varlen(
        query,
        key,
        value,
        *packed,
        block_table=block_table,
        window=window_size,
        scale=scale,
        return_lse=return_aux is not None and bool(return_aux.lse),
        batch_invariant=num_splits == 1,
    )
