"""Attention over a sequence of which each rank has a part."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.checks import check_rank, check_tensor, expect
from fastattn.dispatch.thread_state import asked
from fastattn.distributed.arguments import Arguments, check_heads, split_groups
from fastattn.distributed.blocks import Spread
from fastattn.distributed.collectives import Group, all_to_all, process_groups
from fastattn.distributed.gathered import gathered_attention
from fastattn.distributed.local_attention import LocalAttention
from fastattn.distributed.ring import ring_attention
from fastattn.distributed.sequence import in_order_of_parts, in_order_of_ranks, parts_per_rank
from fastattn.functional.attend import attend
from fastattn.functional.attention_checks import UNBOUNDED, Options, check_slopes


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = ...,
    strategy: str = ...,
    layout: str = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = ...,
    strategy: str = ...,
    layout: str = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    strategy: str = "allgather",
    layout: str = "contiguous",
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``fastattn.attention`` over a sequence that is spread over ranks: this rank's part of the result.

    All ranks of the group call it, each with its parts of query, key and value, as ``shard_sequence`` gives them. It is
    differentiable: a rank's gradients of its own parts are those of the sum of all ranks' losses, and those of what
    every rank holds (``alibi_slopes``, ``sinks``) are this rank's share, which DDP adds up. Results over the keys of
    different ranks are merged in float32, and so are gradients.

    Args:
        query: ``[B, Hq, S / W, D]``; key: ``[B, Hkv, S / W, D]``; value: ``[B, Hkv, S / W, Dv]``, on W ranks.
        group: a process group, a mesh of one dimension, or None for the default group. In a mesh of two dimensions,
            ranks along the second exchange sequence for heads, as with ``"ulysses"``, and ranks along the first follow
            ``strategy``.
        strategy: ``"ring"``: the keys and values of one rank after the other arrive while a rank attends to those of
            the rank before (Liu et al., "Ring attention", 2023).
            ``"allgather"``: each rank gathers all keys and values, some heads at a time, and attends to them with its
            own queries. Where a window leaves few keys to see, it gathers those alone.
            ``"ulysses"``: ranks exchange sequence for heads, so that each attends over the whole sequence with some
            heads, and exchange the results back (Jacobs et al., "DeepSpeed Ulysses", 2023). W divides Hq and Hkv.
        layout: ``"contiguous"`` or ``"zigzag"``: see ``shard_sequence``.
        causal, window, softcap, alibi_slopes, sinks, dropout_p, scale, return_lse, deterministic: as in
            ``fastattn.attention``, by positions in the whole sequence.
        dropout_seed: the same on all ranks, or None: the first rank draws one. What is dropped does not depend on the
            number of ranks.

    Returns:
        ``[B, Hq, S / W, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, S / W]``.

    Raises:
        InputError, TypeError: as ``fastattn.attention``; also for a group that is not initialised, a length that the
            layout does not divide, and heads that W does not divide. With ``FASTATTN_CHECK=1`` all ranks raise where
            one rank is wrong, or where ranks differ in shapes or options; without it the others would wait.
    """
    groups = process_groups(group)
    arguments = Arguments(
        *(query, key, value, strategy, causal, window, softcap, alibi_slopes, sinks),
        *(dropout_p, dropout_seed, scale, return_lse, deterministic),
    )

    def check() -> dict[str, Any]:
        by_heads, _ = split_groups(groups, strategy)
        _check_parts(query, key, value, layout)
        check_heads(query, key, by_heads)
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.device, *query.shape[:2])
        if dropout_p > 0 and strategy == "ring":
            rows = query.shape[2] * math.prod(map(dist.get_world_size, groups[1:])) // parts_per_rank(layout)
            expect(rows % 4 == 0, "query", "parts of a multiple of 4 rows for dropout with strategy 'ring'", rows)
        return {"layout": layout}

    query, key, value, options = arguments.prepared(groups, check)
    by_heads, by_keys = split_groups(groups, strategy)
    inputs = _Inputs(query, key, value, alibi_slopes, sinks, LocalAttention(options, 0, query.shape[1], asked()))
    if by_heads is not None:
        inputs = _with_whole_sequence(inputs, by_heads, layout)
    if by_keys is None:
        out, lse = _attend(inputs)
    else:
        goes_by_places = alibi_slopes is not None or dropout_p > 0
        spread = Spread(layout, dist.get_world_size(by_keys), inputs.query.shape[2], options.window, goes_by_places)
        over_keys = ring_attention if strategy == "ring" else gathered_attention
        out, lse = over_keys(*inputs[:5], spread, inputs.attention, by_keys)
    if by_heads is not None:
        out = _to_all_heads(out, by_heads, layout)
        if return_lse:
            lse = _to_all_heads(lse[..., None], by_heads, layout)[..., 0]
    return (out, lse) if return_lse else out


class _Inputs(NamedTuple):
    """The tensors and options with which a rank attends. ``attention`` has no slopes."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    attention: LocalAttention


def _check_parts(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    parts = parts_per_rank(layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        check_rank(name, tensor, "[B, H, S / W, D]")
        fits = (tensor.shape[0], tensor.shape[2]) == (query.shape[0], query.shape[2])
        expect(fits, name, f"batch {query.shape[0]} and {query.shape[2]} rows, as query has", list(tensor.shape))
    expect(query.shape[2] % parts == 0, "query", f"a multiple of {parts} rows for {layout}", query.shape[2])


# --- Sequence for heads, and back -------------------------------------------------------------------------------------


def _with_whole_sequence(inputs: _Inputs, group: dist.ProcessGroup, layout: str) -> _Inputs:
    """Returns the inputs of some of the heads, over the parts of the sequence that all ranks of the group have."""
    heads = inputs.query.shape[1] // dist.get_world_size(group)
    own = slice(dist.get_rank(group) * heads, (dist.get_rank(group) + 1) * heads)
    slopes, sinks = inputs.slopes, inputs.sinks
    query, key, value = (_to_whole_sequence(tensor, group, layout) for tensor in inputs[:3])
    return _Inputs(
        query,
        key,
        value,
        None if slopes is None else slopes[..., own],
        None if sinks is None else sinks[own],
        inputs.attention.of_heads(own),
    )


def _attend(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Attends over the whole sequence.

    Dropout numbers the heads through all batch entries. A rank has some heads of each, so it takes one entry at a time.
    """
    options, first_head, all_heads, _ = inputs.attention

    def of(entries: slice) -> tuple[Tensor, ...]:
        query, key, value = (tensor[entries] for tensor in inputs[:3])
        slopes = inputs.slopes if inputs.slopes is None or inputs.slopes.dim() == 1 else inputs.slopes[entries]
        found = attend(
            (query, key, value, None, slopes, inputs.sinks, None, None, None),
            Options(
                *(0, 0, False, options.window, options.softcap, options.dropout_p, options.scale, False),
                first_head=first_head + entries.start * all_heads,
            ),
            options.dropout_seed,
            options.deterministic,
            return_lse=True,
        )
        assert isinstance(found, tuple)
        return found

    batch = inputs.query.shape[0]
    if options.dropout_p == 0 or batch < 2:
        out, lse = of(slice(0, batch))
        return out, lse
    out, lse = (torch.cat(of_entries) for of_entries in zip(*(of(slice(b, b + 1)) for b in range(batch)), strict=True))
    return out, lse


def _to_whole_sequence(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """Turns each rank's ``[B, H, S / W, D]`` into ``[B, H / W, S, D]``, with the parts of the sequence in order."""
    by_rank = all_to_all(x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0), group)
    return in_order_of_parts(by_rank.movedim(0, 2).flatten(2, 3), 2, layout, dist.get_world_size(group))


def _to_all_heads(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """The inverse: turns ``[B, H / W, S, D]`` into ``[B, H, S / W, D]``."""
    by_rank = in_order_of_ranks(x, 2, layout, dist.get_world_size(group)).unflatten(2, (dist.get_world_size(group), -1))
    return all_to_all(by_rank.movedim(2, 0), group).movedim(0, 1).flatten(1, 2)
