"""Defines flash-attn's private forward and backward functions, which packages for ring attention, and diffusers, call.

These functions record nothing for autograd. Ring attention calls forward for each block of keys and merges the results,
then calls backward for each block: in backward, ``k`` is one block, but ``out`` and ``softmax_lse`` are the merged
results over all keys. ``softmax_d`` is ``rowsum(dout * out)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.functional.attention_backward import Packed
from fastattn.integrations.flash_attn.calls import Options, backward, forward_dense, forward_packed
from fastattn.integrations.flash_attn.conventions import rows_of
from fastattn.integrations.flash_attn.keywords import read_keywords

_ROWS_OF_A_TILE = 128


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``(out [B, Sq, H, Dv], softmax_lse [B, H, Sq], S_dmask, rng_state)``."""
    window = (window_size_left, window_size_right)
    options = Options.of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    with torch.no_grad():
        return forward_dense(q, k, v, options, return_lse=True, return_softmax=return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes ``dq``, ``dk`` and ``dv``; returns ``softmax_d``, float32 ``[B, H, Sq rounded up to 128]``."""
    window = (window_size_left, window_size_right)
    options = Options.of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    rows = backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, rng_state, None)
    return F.pad(rows, (0, -rows.shape[-1] % _ROWS_OF_A_TILE))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``(out [total_q, H, Dv], softmax_lse [H, total_q], S_dmask, rng_state)``."""
    read_keywords(_flash_attn_varlen_forward, {"leftpad_k": leftpad_k}, served=())
    window = (window_size_left, window_size_right)
    options = Options.of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        return forward_packed(
            q,
            k,
            v,
            packed,
            options,
            return_lse=True,
            return_softmax=return_softmax,
            block_table=block_table,
            seqused_k=seqused_k,
        )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes ``dq``, ``dk`` and ``dv``; returns ``softmax_d``, float32 ``[H, total_q + 128 B]``.

    Sequence ``b`` begins at column ``cu_seqlens_q[b] + 128 b`` of ``softmax_d``.
    """
    window = (window_size_left, window_size_right)
    options = Options.of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rows = backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, rng_state, packed)
    total, batch = q.shape[0], cu_seqlens_q.shape[0] - 1
    sequence, _ = rows_of(cu_seqlens_q, total)
    row = torch.arange(total, device=q.device)
    softmax_d = rows.new_zeros(rows.shape[0], total + _ROWS_OF_A_TILE * batch)
    return softmax_d.index_copy(1, row + _ROWS_OF_A_TILE * sequence, rows)


# In flash-attn, these names are the same functions, registered as operators of torch.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
