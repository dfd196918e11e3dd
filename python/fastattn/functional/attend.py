"""Carries out one call of ``attention`` or ``attention_varlen``: checks it, chooses a backend, and runs it there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import reference, run
from fastattn.checks import check_bool, check_tensor, expect, places_are_checked
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional import composite, torch_sdpa
from fastattn.functional.attention_checks import (
    CheckedCall,
    Options,
    Tensors,
    check_call,
    check_offsets,
    check_pages,
    check_uncopied,
)
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.checked_once import CheckedOnce
from fastattn.functional.dropout_seed import draw_seed, seed_tensor
from fastattn.ops.attention import AttentionArguments


def attend(
    tensors: Tensors,
    options: Options,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Returns what the public functions return for these arguments of theirs, packed where there are offsets."""
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    return_lse = check_bool("return_lse", return_lse)
    if deterministic is not None:
        deterministic = check_bool("deterministic", deterministic)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        query = autocast_to(cast, query)
        if block_table is None:  # pages keep their dtype, as they are never copied
            key, value = autocast_to(cast, key), autocast_to(cast, value)
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:  # every query takes a float32 bias: it stays exact
            bias = autocast_to(cast, bias)
        tensors = (query, key, value, bias, *tensors[4:])

    checked = _checked_calls.get(tensors, options)
    if cu_seqlens_q is not None and places_are_checked(cu_seqlens_q, cu_seqlens_k, block_table):
        assert cu_seqlens_k is not None
        check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], checked.max_seqlens[0])
        check_offsets(
            "cu_seqlens_k", cu_seqlens_k, None if block_table is not None else key.shape[0], checked.max_seqlens[1]
        )
        if block_table is not None:
            lengths, capacity = cu_seqlens_k.diff(), block_table.shape[1] * key.shape[2]
            longest = max(lengths.tolist(), default=0)
            expect(longest <= capacity, "block_table", f"room for the {longest} keys of a sequence", f"{capacity}")
            check_pages(block_table, lengths, key.shape[0], key.shape[2])
    seed = None
    if checked.dropout_p > 0 and dropout_seed is not None:
        seed = seed_tensor(dropout_seed, query.device)

    choice = choose(checked.call)
    if checked.dropout_p > 0 and seed is None:  # after the choice, as explain must not draw from the generator
        seed = draw_seed(query.device)
    if choice.backend == "torch":
        with without_autocast(query.device.type):
            out, lse, *others = _in_pytorch(tensors, checked, seed, options.first_head, return_lse, deterministic)
    else:
        if block_table is not None:
            for name, pages in (("key", key), ("value", value)):
                check_uncopied(name, pages, "pages are never copied")
        out, lse, *others = run.attention(
            choice,
            AttentionArguments(
                query,
                key,
                value,
                bias,
                None if alibi_slopes is None else torch.atleast_2d(alibi_slopes.float()),
                None if sinks is None else sinks.float(),
                seed,
                cu_seqlens_q,
                cu_seqlens_k,
                *checked.max_seqlens,
                checked.scale,
                *checked.window,
                first_head=options.first_head,
                softcap=checked.softcap,
                dropout_p=checked.dropout_p,
                block_table=block_table,
                batch_invariant=batch_invariant,
                return_max_logit=options.return_max_logit,
            ),
            checked.needs_grad,
            is_deterministic(deterministic),
        )
    note(checked.call.op, choice.backend, choice.kernel)
    results = (out, *([lse] if return_lse else []), *(others if options.return_max_logit else []))
    return results if len(results) > 1 else out


_checked_calls = CheckedOnce(check_call)


def _in_pytorch(
    tensors: Tensors,
    checked: CheckedCall,
    seed: Tensor | None,
    first_head: int,
    return_lse: bool,
    deterministic: bool | None,
) -> tuple[Tensor, ...]:
    """Returns output, lse and, where they are wanted, the largest scores; an lse that is not wanted may be empty.

    PyTorch's own attention runs where it can express the call, else PyTorch's operators, else the reference.
    """
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    max_seqlens = checked.max_seqlens
    if checked.torch_can and not return_lse and torch_sdpa.can_express_now(checked.call, deterministic):
        common = checked.window, checked.scale, "gqa" in checked.call.features
        if cu_seqlens_q is None:
            return torch_sdpa.attend(query, key, value, bias, *common), query.new_empty(0)
        out = torch_sdpa.attend_packed(
            query, key, value, cu_seqlens_q, cu_seqlens_k, lambda q, k, v: torch_sdpa.attend(q, k, v, None, *common)
        )
        if out is not None:
            return out, query.new_empty(0)
    options: dict[str, Any] = {
        "window": checked.window,
        "softcap": checked.softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "scale": checked.scale,
    }
    if not checked.call.features & {"dropout", "max logit", "paged"}:
        if cu_seqlens_q is None:
            composed = composite.attend(query, key, value, bias=bias, **options)
            if composed is not None:
                return composed
        elif not return_lse and (alibi_slopes is None or alibi_slopes.dim() == 1) and query.numel() and value.numel():

            def attend_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                composed = composite.attend(q, k, v, bias=None, **options)
                assert composed is not None, "the offsets were readable"
                return composed[0]

            out = torch_sdpa.attend_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, attend_to)
            if out is not None:
                return out, query.new_empty(0)
    options |= {
        "dropout_p": checked.dropout_p,
        "dropout_seed": seed,
        "first_head": first_head,
        "return_max_logit": "max logit" in checked.call.features,
    }
    if cu_seqlens_q is None:
        return reference.attention(query, key, value, bias=bias, **options)
    return reference.attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, *max_seqlens, block_table=block_table, **options
    )


def is_deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
