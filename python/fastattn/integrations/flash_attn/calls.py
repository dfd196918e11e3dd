"""Turns calls of flash-attn's functions, public and private, into calls of fastattn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.checks import check_rank, check_tensor
from fastattn.errors import InputError
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.attention_backward import Packed, attention_backward
from fastattn.functional.dropout_seed import draw_seed
from fastattn.integrations.flash_attn.conventions import (
    alibi_of_dense,
    alibi_of_packed,
    bounds,
    from_flash_lse,
    signed_exponentials,
    to_flash_lse,
    used_first,
    used_keys,
)


class Options(NamedTuple):
    """Holds flash-attn's options in fastattn's terms."""

    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    scale: float | None
    deterministic: bool | None
    dropout_seed: Tensor | None = None

    @staticmethod
    def of(
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: Any,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        sinks: Tensor | None = None,
    ) -> Options:
        window = bounds(window_size, causal)
        return Options(window, softcap, alibi_slopes, sinks, dropout_p, softmax_scale, deterministic or None)

    def seeded(self, device: torch.device) -> Options:
        """Returns the options with a new seed if there is dropout."""
        return self._replace(dropout_seed=draw_seed(device)) if self.dropout_p > 0 else self


class Results(NamedTuple):
    """Holds the results of flash-attn's private forward functions. A result that was not asked for is empty."""

    out: Tensor
    softmax_lse: Tensor
    S_dmask: Tensor
    rng_state: Tensor


def forward_dense(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, return_lse: bool, return_softmax: bool
) -> Results:
    """Attends over dense tensors ``q [B, Sq, H, D]``, ``k [B, Sk, Hk, D]`` and ``v [B, Sk, Hk, Dv]``."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        packed = "; flash_attn_varlen_func takes packed sequences; for one sequence pass q[None], k[None] and v[None]"
        check_rank(name, tensor, "[B, S, H, D]", packed if tensor.dim() == 3 else "")
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads and heads % kv_heads and k.shape[1] and q.shape[1] % k.shape[1] == 0:
        swaps = "q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2)"
        came = f"q {list(q.shape)}, k {list(k.shape)}; if yours are [B, H, S, D], pass {swaps}"
        raise InputError(f"q: expected a multiple of the {kv_heads} heads of k in [B, S, H, D], got {came}")
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options = options.seeded(q.device)
    found: Any = attention(query, key, value, return_lse=return_lse, **options._asdict())
    out, lse = _out_and_lse(found, options, query, key, None)
    s_dmask = _s_dmask(query, key, None, options, return_softmax)
    return Results(out.transpose(1, 2).contiguous(), lse, s_dmask, _rng_state(options, q.device))


def forward_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    options: Options,
    *,
    return_lse: bool,
    return_softmax: bool,
    block_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Results:
    """Attends over packed sequences ``q [total_q, H, D]``, ``k [total_k, Hk, D]`` and ``v [total_k, Hk, Dv]``.

    With a ``block_table``, k and v are pages ``[num_pages, page_size, H, D]``. ``seqused_q`` and ``seqused_k``, int32
    ``[B]``, say how many rows at the beginning of each sequence are used.
    """
    order = is_used = None
    k, v, cu_seqlens_k = used_keys(k, v, packed.cu_seqlens_k, seqused_k, block_table)
    packed = packed._replace(cu_seqlens_k=cu_seqlens_k)
    if seqused_q is not None:
        order, cu_seqlens_q, is_used = used_first(packed.cu_seqlens_q, seqused_q, q.shape[0])
        packed, q = packed._replace(cu_seqlens_q=cu_seqlens_q), q[order]

    options = options.seeded(q.device)
    found: Any = attention_varlen(q, k, v, *packed, block_table=block_table, return_lse=return_lse, **options._asdict())
    out, lse = _out_and_lse(found, options, q, k, packed)
    if return_softmax and options.dropout_p > 0 and block_table is not None:
        raise InputError("return_attn_probs: expected False with a block_table and dropout, got True; leave one out")
    s_dmask = _s_dmask(q, k, packed, options, return_softmax)
    if is_used is not None and order is not None:
        rows = is_used.shape[0]
        out = out.new_zeros(rows, *out.shape[1:]).index_copy(0, order, out).masked_fill(~is_used[:, None, None], 0.0)
        if return_lse:
            lse = lse.new_zeros(lse.shape[0], rows).index_copy(1, order, lse).masked_fill(~is_used, torch.inf)
    return Results(out, lse, s_dmask, _rng_state(options, q.device))


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: Options,
    rng_state: Tensor | None,
    packed: Packed | None,
) -> Tensor:
    """Writes the gradients of q, k and v into ``grads``, and returns ``rowsum(dout * out)`` for every row.

    ``out`` and ``softmax_lse`` may be results over more keys than k has.
    """
    if options.dropout_p > 0 and rng_state is None:
        raise InputError("rng_state: expected what the forward pass returned, because dropout_p > 0, got None")
    seed = rng_state[0] if options.dropout_p > 0 and rng_state is not None else None
    offsets: dict[str, Any] = {} if packed is None else packed._asdict()
    tensors = (dout, q, k, v, out)
    if packed is None:
        tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)  # type: ignore[assignment]
    grad_out, query, key, value, ours = tensors
    lse = from_flash_lse(softmax_lse, _alibi(options, query, key, packed)).contiguous()
    call = AttentionCall(query, key, value, **options._replace(dropout_seed=seed)._asdict(), **offsets)
    found = attention_backward(call, grad_out, ours, lse)
    assert found is not None
    with torch.no_grad():
        for given, grad in zip(grads, found, strict=True):
            if given is not None:
                given.copy_(grad if packed is not None else grad.transpose(1, 2))
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def _alibi(options: Options, query: Tensor, key: Tensor, packed: Packed | None) -> Tensor | None:
    if packed is not None:
        return alibi_of_packed(options.alibi_slopes, options.window, query.shape[0], packed)
    num_keys = key.shape[2]
    return alibi_of_dense(options.alibi_slopes, options.window, query.shape[2], num_keys, num_keys)


def _out_and_lse(
    found: Any, options: Options, query: Tensor, key: Tensor, packed: Packed | None
) -> tuple[Tensor, Tensor]:
    """Returns output and lse from what attention returned. The lse is as in flash-attn, or empty if not asked for."""
    if isinstance(found, Tensor):
        return found, query.new_empty(0, dtype=torch.float32)
    out, lse = found
    return out, to_flash_lse(lse, _alibi(options, query, key, packed))


def _rng_state(options: Options, device: torch.device) -> Tensor:
    """Returns seed and offset, int64 ``[2]``, as flash-attn does. The offset is 0, because fastattn needs no offset."""
    state = torch.zeros(2, dtype=torch.int64, device=device)
    if options.dropout_seed is not None:
        state[0] = options.dropout_seed
    return state


def _s_dmask(query: Tensor, key: Tensor, packed: Packed | None, options: Options, wanted: bool) -> Tensor:
    if not wanted or options.dropout_seed is None:
        return query.new_empty(0)
    given = {name: value for name, value in options._asdict().items() if name not in ("deterministic", "sinks")}
    return signed_exponentials(query, key, packed, **given)
