"""Implements torch's flash attention operators with fastattn's functions.

The functions follow torch's conventions, which are those of torch's shape functions (``torch/_meta_registrations.py``)
and of torch's alternative implementations (``torch/nn/attention/_fa3.py``):

- ``_scaled_dot_product_flash_attention`` takes ``[B, H, S, D]``, ``_flash_attention_forward`` takes ``[B, S, H, D]`` or
  packed ``[total, H, D]``. Fewer KV heads mean grouped-query attention; causal masks and windows align to the bottom
  right.
- Results and gradients have the strides of ``torch.empty_like`` of the query, key or value.
- The lse is float32 ``[B, H, Sq]``, packed ``[H, total_q]``. With ALiBi under a causal mask it lacks a constant of each
  row (see ``fastattn.integrations.flash_attn``). For a row without keys the lse is -inf, as in torch's alternative
  implementations. Torch's own kernels return +inf, which gives wrong results when blocks are merged.
- ``rng_state`` is uint64 ``[2]``: here the dropout seed, and a constant that marks fastattn's states.
- The backward operators take no ALiBi slopes, ``seqused_k`` or ``block_table``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.checks import check_dtype, check_rank, check_same_device, check_shape, check_tensor, expect
from fastattn.dispatch.support import SUPPORT
from fastattn.dispatch.thread_state import Asked, as_asked, asked
from fastattn.errors import InputError
from fastattn.functional.attention import carry_out, prepare
from fastattn.functional.attention_backward import Packed, attention_backward
from fastattn.functional.autocast import without_autocast
from fastattn.functional.dropout_seed import draw_seed
from fastattn.integrations.flash_attn.conventions import alibi_of_dense, alibi_of_packed, bounds, used_keys

_OUR_RNG_STATE = 0x66617374_6174746E  # "fastattn" in ASCII; torch's own states have a small number here
# The indices of these arguments in both backward operators.
_LSE, _DROPOUT_P, _RNG_STATE, _UNUSED = 5, 10, 12, 13

# torch's operators return an unused tensor, which the backward pass gets as an argument. Its storage offset, in
# elements, tells the host which implementation ran the forward pass, and must also run the backward pass. This offset
# means an implementation other than fastattn.
_NOT_OURS_OFFSET = 2
# If fastattn ran the forward pass, the offset tells which backend was forced, and the backward pass uses the same
# backend. All offsets are even, so that 8-byte elements are aligned to 16 bytes: Inductor copies unaligned tensors.
_FORCED_OFFSETS = {None: 0, "cuda": 4, "triton": 6}

# No kernel computes gradients for larger head dims, and a forward operator does not know whether a backward pass
# follows. So calls with larger head dims go to torch's implementation.
_MOST_DIMS_WITH_GRADIENTS = max(support.largest_head_dim_with_gradients() for support in SUPPORT["attention"].values())


class Override:
    """Replaces an operator by a function of fastattn. If the function returns None, because no kernel takes the call,
    the previous implementation runs."""

    def __init__(self, name: str, function: Callable[..., Any], dispatch_key: str) -> None:
        self._name, self._function = name, function
        is_there = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", dispatch_key)
        self._before = torch.library.get_kernel(f"aten::{name}", dispatch_key) if is_there else None
        self._is_backward = name.endswith("_backward")

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensor: Tensor = args[0]
        wish = _asked_of_forward(args[_UNUSED]) if self._is_backward else asked()._replace(sdpa=False)
        if wish is not None:  # sdpa=False, because torch has already applied sdpa_kernel
            with without_autocast(tensor.device.type), as_asked(wish):
                results = self._function(*args, **kwargs)
            if results is not None:
                return results
        if self._before is None:
            raise InputError(
                f"aten::{self._name}: no kernel of fastattn takes this call, and on {tensor.device.type} torch has "
                f"none of its own. It got {tensor.dtype} {list(tensor.shape)}; fastattn.attention takes every call"
            )
        if self._is_backward:
            return self._before.call_boxed(keyset, *_for_torch(args), **kwargs)
        results = self._before.call_boxed(keyset, *args, **kwargs)
        return _marked(results) if isinstance(results, (tuple, list)) else results


def _asked_of_forward(unused: Tensor) -> Asked | None:
    """Returns what the forward pass's thread asked for, or None if another implementation ran the forward pass."""
    offset = unused.storage_offset()
    if offset == _NOT_OURS_OFFSET:
        return None
    forced = next((backend for backend, known in _FORCED_OFFSETS.items() if known == offset), None)
    return Asked(forced, sdpa=False)


def _marked(results: Any) -> tuple[Any, ...]:
    """Marks the results of another implementation's forward pass.

    The mark is the storage offset of the second to last result, which torch's CUDA kernels do not use.
    """
    *others, unused, debug_mask = results
    if isinstance(unused, Tensor) and unused.dim() == 0:
        unused = unused.new_empty(_NOT_OURS_OFFSET + 1)[_NOT_OURS_OFFSET].copy_(unused)
    return *others, unused, debug_mask


def _for_torch(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a backward operator's arguments for torch's own kernel, which expects lse +inf for rows without keys."""
    lse, dropout_p, rng_state = (arguments[index] for index in (_LSE, _DROPOUT_P, _RNG_STATE))
    if dropout_p > 0 and rng_state.numel() == 2:
        _check_whose(rng_state.view(torch.int64), is_ours=False)
    return *arguments[:_LSE], lse.masked_fill(lse == -math.inf, math.inf), *arguments[_LSE + 1 :]


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    seed = draw_seed(query.device) if dropout_p > 0 else None
    call = AttentionCall(
        query, key, value, causal=is_causal, dropout_p=dropout_p, scale=scale, return_lse=True, dropout_seed=seed
    )
    found = _by_kernel(call, return_debug_mask)
    if found is None:
        return None
    out, lse = found
    out = _laid_out_like(query, out)
    rng_state, unused, debug_mask = _auxiliary(query, seed)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, debug_mask


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...] | None:
    """Ignores ``max_q`` and ``max_k``: torch's context parallel passes the lengths of the whole sequence."""
    seed = _seed_of(philox_seed, dropout_p)
    call = AttentionCall(query, key, value, causal=is_causal, dropout_p=dropout_p, scale=scale, dropout_seed=seed)
    grads = attention_backward(call, grad_out, out, logsumexp.contiguous(), by_kernel_only=True)
    return None if grads is None else tuple(map(_laid_out_like, (query, key, value), grads))


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...] | None:
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    for name, given in (("alibi_slopes", alibi_slopes), ("seqused_k", seqused_k), ("block_table", block_table)):
        if given is None:
            continue
        if is_recorded:
            raise InputError(
                f"{name}: expected None if query, key or value requires gradients, as torch's backward operator does "
                "not take it, got a tensor; call fastattn.attention, attention_varlen or torch_flash.varlen_attn"
            )
        if cum_seq_q is None and name != "alibi_slopes":
            raise InputError(
                f"{name}: expected None with tensors [B, S, H, D], got a tensor; pass packed sequences with cum_seq_q"
            )
    window = bounds((window_size_left, window_size_right), is_causal)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    call = AttentionCall(
        query,
        key,
        value,
        alibi_slopes=alibi_slopes,
        window=window,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=True,
        dropout_seed=seed,
    )
    alibi: Tensor | None
    if cum_seq_q is None:
        call = call.with_tensors(tuple(tensor.transpose(1, 2) for tensor in (query, key, value)))
        num_queries, num_keys = query.shape[1], key.shape[1]
        alibi = alibi_of_dense(alibi_slopes, window, num_queries, num_keys, num_keys)
    else:
        k, v, packed = packed_keys(key, value, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
        call = call._replace(key=k, value=v, block_table=block_table, **packed._asdict())
        call = call._replace(batch_invariant=num_splits == 1)
        alibi = alibi_of_packed(alibi_slopes, window, query.shape[0], packed)
    found = _by_kernel(call, return_debug_mask)
    if found is None:
        return None
    out, lse = found
    with torch.no_grad():
        if cum_seq_q is None:
            out = out.transpose(1, 2)
        if alibi is not None:
            lse = lse - alibi
        out = _laid_out_like(query, out)
    return out, lse, *_auxiliary(query, seed)


def _flash_forward_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor | None:
    if dropout_p > 0:
        raise InputError(
            f"dropout_p: expected 0 in _flash_attention_forward_no_dropout_inplace, got {dropout_p}; call "
            "_flash_attention_forward for dropout"
        )
    if out.shape != query.shape or out.dtype != query.dtype:
        came = f"{out.dtype} {list(out.shape)}"
        raise InputError(f"out: expected the query's shape and dtype, {query.dtype} {list(query.shape)}, got {came}")
    sizes = (cum_seq_q, cum_seq_k, max_q, max_k)
    found = _flash_forward(query, key, value, *sizes, 0.0, is_causal, return_debug_mask, **options)
    if found is None:
        return None
    result, lse, *_ = found
    with torch.no_grad():
        out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...] | None:
    tensors = (grad_out, out, query, key, value)
    packed = None
    if cum_seq_q is None:
        tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)  # type: ignore[assignment]
    else:
        packed = Packed(cum_seq_q, _given(cum_seq_k), max_q, max_k)
    call = AttentionCall(
        *tensors[2:],
        **({} if packed is None else packed._asdict()),
        window=bounds((window_size_left, window_size_right), is_causal),
        dropout_p=dropout_p,
        scale=scale,
        dropout_seed=_seed_of(rng_state, dropout_p),
    )
    grads = attention_backward(call, *tensors[:2], logsumexp.contiguous(), by_kernel_only=True)
    if grads is None:
        return None
    if packed is None:
        grads = tuple(grad.transpose(1, 2) for grad in grads)  # type: ignore[assignment]
    return tuple(map(_laid_out_like, (query, key, value), grads))


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
}


def packed_keys(
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Packed]:
    """Returns keys, values and offsets as ``attention_varlen`` takes them, from pages ``[num_pages, page_size, H, D]``
    or packed rows.

    ``seqused_k``, int32 ``[B]``, says how many keys at the beginning of each sequence are used.
    """
    row = "[total_k, Hkv, D]" if block_table is None else "[num_pages, page_size, Hkv, D]"
    for name, tensor, layout in (
        ("key", key, row),
        ("value", value, row),
        ("cum_seq_q", cum_seq_q, "[B + 1]"),
        ("seqused_k", seqused_k, "[B]"),
    ):
        check_tensor(name, tensor, optional=name == "seqused_k")
        if tensor is not None:
            check_rank(name, tensor, layout)
    if seqused_k is not None:
        check_dtype("seqused_k", seqused_k, (torch.int32,))
        check_same_device("seqused_k", seqused_k, key.device)
        check_shape("seqused_k", seqused_k, (cum_seq_q.shape[0] - 1,), "[B]")
    if seqused_k is None or block_table is None:
        cum_seq_k = _given(cum_seq_k)
    key, value, offsets = used_keys(key, value, cum_seq_k, seqused_k, block_table)
    return key, value, Packed(cum_seq_q, offsets, max_q, max_k)


def _given(cum_seq_k: Tensor | None) -> Tensor:
    if cum_seq_k is None:
        raise InputError("cum_seq_k: expected the offsets of the keys, or seqused_k and a block_table, got None")
    return cum_seq_k


def _by_kernel(call: AttentionCall, return_debug_mask: bool) -> tuple[Tensor, Tensor] | None:
    """Returns output and lse, without gradients, or None where no kernel takes the call.

    It raises for a debug mask, and for a value head dim that differs from the query's: torch does not allow it.
    """
    head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    if head_dim > _MOST_DIMS_WITH_GRADIENTS:
        return None
    came = f"{value_dim}; fastattn.attention takes others"
    expect(value_dim == head_dim, "value", f"the query's head dim {head_dim}, as torch's operators have it", came)
    came = "True; call torch_flash.disable() to get them from torch's own kernel"
    expect(not return_debug_mask, "return_debug_mask", "False, since fastattn keeps no probabilities", came)
    with torch.no_grad():
        prepared = prepare(call)
        if prepared.choice.backend == "torch":
            return None
        out, lse = carry_out(prepared)
    return out, lse


def _laid_out_like(like: Tensor, result: Tensor) -> Tensor:
    """Returns ``result`` with the strides of ``torch.empty_like(like)``, on which compiled graphs rely."""
    if result.stride() == like.stride():
        return result
    wanted = torch.empty_like(like)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


# --- dropout --------------------------------------------------------------------------------------------------------


def _auxiliary(query: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``rng_state``, torch's unused tensor and the debug mask, which is empty."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if seed is not None:
        state[0], state[1] = seed, _OUR_RNG_STATE
    offset = _FORCED_OFFSETS[asked().forced]
    unused = torch.zeros(offset + 1, dtype=torch.uint64, device=query.device)[offset]
    return state.view(torch.uint64), unused, query.new_empty(0)


def _seed_of(rng_state: Tensor, dropout_p: float) -> Tensor | None:
    if dropout_p == 0:
        return None
    state = rng_state.view(torch.int64)
    _check_whose(state, is_ours=True)
    return state[0]


def _check_whose(rng_state: Tensor, is_ours: bool) -> None:
    """Asserts on the device that ``rng_state`` is fastattn's (``is_ours``) or another implementation's. A failed
    assertion stops the device."""
    torch._assert_async(
        (rng_state[1] == _OUR_RNG_STATE) == is_ours,
        "rng_state: the forward pass with dropout ran in another implementation of flash attention than its backward "
        "pass; call torch_flash.enable() and disable() between steps",
    )
