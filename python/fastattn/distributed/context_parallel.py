"""Attention over a sequence of which each rank has a part."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastattn.checks import check_bool, check_choice, check_head_counts, check_rank, check_tensor, expect
from fastattn.distributed.agreement import checked_on_all_ranks
from fastattn.distributed.collectives import Group, all_to_all, process_group
from fastattn.distributed.ring import RingOptions, ring_attention
from fastattn.distributed.sequence import (
    gather_sequence,
    in_order_of_parts,
    in_order_of_ranks,
    parts_of_rank,
    parts_per_rank,
)
from fastattn.functional.attention import attention
from fastattn.functional.attention_checks import UNBOUNDED, check_sinks, check_slopes, check_window
from fastattn.functional.autocast import autocast_dtype, autocast_to

STRATEGIES = ("ring", "allgather", "ulysses")


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
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``fastattn.attention`` over a sequence that is spread over ranks: this rank's part of the result.

    All ranks of the group call it, each with its parts of query, key and value, as ``shard_sequence`` gives them. It is
    differentiable: a rank's gradients of its own parts are those of the sum of all ranks' losses, and those of what
    every rank holds (``alibi_slopes``, ``sinks``) are this rank's share, which DDP adds up.

    Args:
        query: ``[B, Hq, S / W, D]``; key: ``[B, Hkv, S / W, D]``; value: ``[B, Hkv, S / W, Dv]``, on W ranks.
        group: a process group, a mesh of one dimension, or None: the default group.
        strategy: ``"ring"``: keys and values of one rank after the other come in while those before are attended to,
            and results are merged in float32; no window, no ALiBi (Liu et al., "Ring attention", 2023). Of 16 bits,
            what a kernel finds for the keys of one rank is rounded before that.
            ``"allgather"``: each rank gathers all keys and values, and attends to them with its own queries.
            ``"ulysses"``: ranks exchange sequence for heads, so that each attends over the whole sequence with some
            heads, and back (Jacobs et al., "DeepSpeed Ulysses", 2023): W divides Hq and Hkv.
        layout: ``"contiguous"`` or ``"zigzag"``: see ``shard_sequence``.
        causal, window, softcap, alibi_slopes, sinks, scale, return_lse, deterministic: as in ``fastattn.attention``, by
            positions in the whole sequence.

    Returns:
        ``[B, Hq, S / W, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, S / W]``.

    Raises:
        InputError, TypeError: as ``fastattn.attention``; a group that is not initialised, a length that the layout does
            not divide, heads that W does not divide. With ``FASTATTN_CHECK=1`` on every rank, also where only one is
            wrong, or where ranks differ in shapes or options; else the other ranks would wait for it.
    """
    found = process_group(group)

    def check() -> dict[str, Any]:
        tensors = {"query": query, "key": key, "value": value, "alibi_slopes": alibi_slopes, "sinks": sinks}
        _check_parts(query, key, value, strategy, layout, dist.get_world_size(found))
        batch, heads = query.shape[:2]
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.device, batch, heads)
        if sinks is not None:
            check_sinks(sinks, query.device, heads)
        if strategy == "ring":
            _check_ring(check_window(window), alibi_slopes)
        return {
            **{name: None if t is None else (list(t.shape), str(t.dtype)) for name, t in tensors.items()},
            "strategy": strategy,
            "layout": layout,
            "causal": check_bool("causal", causal),
            "window": check_window(window),
            "softcap": softcap,
            "scale": scale,
        }

    checked_on_all_ranks(found, check)
    cast = autocast_dtype(query.device.type)
    if cast is not None:  # before anything is sent
        query, key, value = (autocast_to(cast, tensor) for tensor in (query, key, value))
    left, right = check_window(window)
    band = left, 0 if causal else right
    if strategy == "ring":
        of_ring = RingOptions(layout, band == (-1, 0), softcap, scale, deterministic)
        out, lse = ring_attention(query, key, value, sinks, of_ring, found)
        return (out, lse) if return_lse else out
    options = _Options(band, softcap, alibi_slopes, sinks, scale, deterministic)
    attend = _by_heads if strategy == "ulysses" else _over_gathered_keys
    out, lse = attend(query, key, value, options, found, layout)
    return (out, lse) if return_lse else out


class _Options(NamedTuple):
    """As ``attention`` takes them; what ``causal`` says is in the window."""

    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scale: float | None
    deterministic: bool | None


def _check_parts(query: Tensor, key: Tensor, value: Tensor, strategy: str, layout: str, world_size: int) -> None:
    check_choice("strategy", strategy, STRATEGIES)
    parts = parts_per_rank(layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        check_rank(name, tensor, "[B, H, S / W, D]")
        fits = (tensor.shape[0], tensor.shape[2]) == (query.shape[0], query.shape[2])
        expect(fits, name, f"batch {query.shape[0]} and {query.shape[2]} rows, as query has", list(tensor.shape))
    check_head_counts(query, key, "key", ("[B, Hq, S / W, D]", "[B, Hkv, S / W, D]"))
    expect(value.shape[1] == key.shape[1], "value", f"the key's {key.shape[1]} heads", value.shape[1])
    expect(query.shape[2] % parts == 0, "query", f"a multiple of {parts} rows for {layout}", query.shape[2])
    if strategy == "ulysses":
        for name, tensor in (("query", query), ("key", key)):
            heads = tensor.shape[1]
            expect(heads % world_size == 0, name, f"heads that the {world_size} ranks divide (ulysses)", heads)


def _check_ring(window: tuple[int, int], alibi_slopes: Tensor | None) -> None:
    """Its blocks are whole or causal: where a row stands among keys of another rank, the kernels cannot be told yet."""
    others = "'allgather' and 'ulysses' have it"
    expect(window in ((-1, -1), (-1, 0)), "window", f"none with strategy 'ring' ({others})", window)
    expect(alibi_slopes is None, "alibi_slopes", f"None with strategy 'ring' ({others})", "a tensor")


# --- "allgather" ------------------------------------------------------------------------------------------------------


def _over_gathered_keys(
    query: Tensor, key: Tensor, value: Tensor, options: _Options, group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, Tensor]:
    keys, values = (gather_sequence(tensor, 2, group=group, layout=layout) for tensor in (key, value))
    parts = parts_of_rank(layout, dist.get_rank(group), dist.get_world_size(group))
    chunks = query.tensor_split(len(parts), dim=2)
    results = [
        _attend_from(part * chunk.shape[2], chunk, keys, values, options)
        for part, chunk in zip(parts, chunks, strict=True)
    ]
    out, lse = (torch.cat(of_parts, dim=2) for of_parts in zip(*results, strict=True))
    return out, lse


def _attend_from(first: int, query: Tensor, keys: Tensor, values: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Attention of rows that stand at positions from ``first`` on, over those of all keys that they can see.

    ``attention`` takes the last row to stand at the last key. Where rows see ``beyond`` keys after the last of them, it
    takes them to stand that many keys further right, and the window moves back. What ALiBi counts from there would be
    wrong: rows of zeros follow the others then.
    """
    left, right = options.window
    rows, total = query.shape[2], keys.shape[2]
    end = total if right < 0 else min(total, first + rows + right)
    begin = 0 if left < 0 else max(0, first - left)
    beyond = end - (first + rows)
    if options.alibi_slopes is not None:
        query = F.pad(query, (0, 0, 0, beyond))
    else:
        left, right = (side if side < 0 else side + move for side, move in ((left, beyond), (right, -beyond)))
    named: dict[str, Any] = options._replace(window=(left, right))._asdict()
    out, lse = attention(query, keys[:, :, begin:end], values[:, :, begin:end], return_lse=True, **named)
    return out[:, :, :rows], lse[:, :, :rows]


# --- "ulysses" --------------------------------------------------------------------------------------------------------


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, options: _Options, group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, Tensor]:
    heads = query.shape[1] // dist.get_world_size(group)
    own = slice(dist.get_rank(group) * heads, (dist.get_rank(group) + 1) * heads)
    slopes, sinks = options.alibi_slopes, options.sinks
    named: dict[str, Any] = options._replace(
        alibi_slopes=None if slopes is None else slopes[..., own], sinks=None if sinks is None else sinks[own]
    )._asdict()
    whole = [_to_whole_sequence(tensor, group, layout) for tensor in (query, key, value)]
    out, lse = attention(whole[0], whole[1], whole[2], return_lse=True, **named)
    return _to_all_heads(out, group, layout), _to_all_heads(lse[..., None], group, layout)[..., 0]


def _to_whole_sequence(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """``[B, H, S / W, D]`` of each rank to ``[B, H / W, S, D]``, the parts of the sequence in order."""
    by_rank = all_to_all(x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0), group)
    return in_order_of_parts(by_rank.movedim(0, 2).flatten(2, 3), 2, layout, dist.get_world_size(group))


def _to_all_heads(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """The inverse: ``[B, H / W, S, D]`` to ``[B, H, S / W, D]``."""
    by_rank = in_order_of_ranks(x, 2, layout, dist.get_world_size(group)).unflatten(2, (dist.get_world_size(group), -1))
    return all_to_all(by_rank.movedim(2, 0), group).movedim(0, 1).flatten(1, 2)
