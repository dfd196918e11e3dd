"""Attention over packed sequences, here documents, of which each rank has parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastattn.checks import check_bool, check_number, check_rank, check_tensor, expect
from fastattn.distributed.agreement import checked_on_all_ranks
from fastattn.distributed.blocks import PackedSpread, Part, index_of
from fastattn.distributed.collectives import all_to_all, process_groups
from fastattn.distributed.context_parallel import check_heads, common_seed, split_groups
from fastattn.distributed.gathered import gathered_attention
from fastattn.distributed.local_attention import LocalAttention
from fastattn.distributed.packed import PackedShards, arrange
from fastattn.distributed.ring import ring_attention
from fastattn.functional.attend import attend
from fastattn.functional.attention_block import BlockOptions
from fastattn.functional.attention_checks import UNBOUNDED, Options, check_sinks, check_slopes, check_window
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.dropout_seed import seed_tensor


@overload
def context_parallel_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: PackedShards,
    *,
    strategy: str = ...,
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
def context_parallel_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: PackedShards,
    *,
    strategy: str = ...,
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


@torch.compiler.disable  # what is sent and computed follows from the lengths: a graph ends before the call
def context_parallel_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: PackedShards,
    *,
    strategy: str = "allgather",
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
    """``fastattn.attention_varlen`` over packed sequences that are spread over ranks: this rank's part of the result.

    Sequences that a rank has whole are attended to there, and ``strategy`` is about the others alone. What
    ``context_parallel_attention`` says of gradients holds here.

    Args:
        query: ``[num_rows, Hq, D]``; key: ``[num_rows, Hkv, D]``; value: ``[num_rows, Hkv, Dv]``: this rank's rows, as
            ``shards.shard`` gives them. What stands in padding has no influence.
        shards: how the sequences lie on the ranks of which group: ``shard_varlen``.
        strategy: as for ``context_parallel_attention``.
        alibi_slopes: ``[Hq]``, or ``[B, Hq]`` for all B sequences. The other options are those of
            ``fastattn.attention_varlen``.
        dropout_seed: the same on all ranks; None: drawn on the first of them. What is dropped does not depend on how
            sequences are spread.

    Returns:
        ``[num_rows, Hq, Dv]``, and with ``return_lse`` the lse, ``[Hq, num_rows]``. Of padding: 0 and -inf.

    Raises:
        InputError, TypeError: as ``context_parallel_attention``; another number of rows than ``shards`` has.
    """
    expect(isinstance(shards, PackedShards), "shards", "what shard_varlen returns", type(shards).__name__)
    groups = process_groups(shards.group)

    def check() -> dict[str, Any]:
        tensors = {"query": query, "key": key, "value": value, "alibi_slopes": alibi_slopes, "sinks": sinks}
        expect(len(groups) < 3, "group", "a mesh of one or two dimensions", len(groups))
        by_heads, _ = split_groups(groups, strategy)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, tensor)
            check_rank(name, tensor, "[num_rows, H, D]")
            expect(tensor.shape[0] == shards.num_rows, name, f"the {shards.num_rows} rows of shards", tensor.shape[0])
        expect(value.shape[1] == key.shape[1], "value", f"the key's {key.shape[1]} heads", value.shape[1])
        check_heads(query, key, 1 if by_heads is None else dist.get_world_size(by_heads))
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.device, len(shards.lengths), query.shape[1])
        if sinks is not None:
            check_sinks(sinks, query.device, query.shape[1])
        if isinstance(dropout_seed, int):
            seed_tensor(dropout_seed, query.device)
        check_bool("return_lse", return_lse)
        return {
            **{name: None if t is None else (list(t.shape), str(t.dtype)) for name, t in tensors.items()},
            "shards": [[(*part[1:], part.length) for part in parts] for parts in shards.parts],
            "strategy": strategy,
            "causal": check_bool("causal", causal),
            "window": check_window(window),
            "softcap": check_number("softcap", softcap, low=0.0),
            "dropout_p": check_number("dropout_p", dropout_p, low=0.0, high=1.0),
            "dropout_seed": dropout_seed if isinstance(dropout_seed, int) else dropout_seed is None,
            "scale": scale,
        }

    checked_on_all_ranks(groups, check)
    cast = autocast_dtype(query.device.type)
    if cast is not None:  # before anything is sent
        query, key, value = (autocast_to(cast, tensor) for tensor in (query, key, value))
    left, right = check_window(window)
    seed = common_seed(dropout_seed, query, groups) if dropout_p > 0 else None
    options = BlockOptions((left, 0 if causal else right), softcap, None, dropout_p, seed, scale, deterministic)
    by_heads, by_keys = split_groups(groups, strategy)
    rows = _Rows(
        query=query.transpose(0, 1)[None],
        key=key.transpose(0, 1)[None],
        value=value.transpose(0, 1)[None],
        slopes=alibi_slopes,
        sinks=sinks,
        attention=LocalAttention(options, 0, query.shape[1]),
        parts=shards.parts,
        lengths=shards.lengths,
        rank=shards.rank,
    )
    out, lse = _attend(rows, by_heads, by_keys, ring_attention if strategy == "ring" else gathered_attention)
    return (out[0].transpose(0, 1), lse[0]) if return_lse else out[0].transpose(0, 1)


class _Rows(NamedTuple):
    """What a rank attends with: some heads, ``[1, H, rows, D]``, and the parts of all ranks that have these heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    attention: LocalAttention  # without slopes
    parts: Sequence[tuple[Part, ...]]
    lengths: tuple[int, ...]
    rank: int

    def is_whole(self, part: Part) -> bool:
        return part.length == self.lengths[part.document or 0]

    @property
    def cut_parts(self) -> tuple[tuple[Part, ...], ...]:
        """Those of documents that are cut, of each rank: its first rows."""
        return tuple(tuple(part for part in parts if not self.is_whole(part)) for parts in self.parts)

    @property
    def whole_documents(self) -> list[Part]:
        return [part for part in self.parts[self.rank] if self.is_whole(part)]


def _attend(
    rows: _Rows, by_heads: dist.ProcessGroup | None, by_keys: dist.ProcessGroup | None, over_keys: Any
) -> tuple[Tensor, Tensor]:
    """Output and lse of all rows. Ranks of ``by_heads`` exchange rows for heads, those of ``by_keys`` keys."""
    found = []
    cut_parts, own_whole = rows.cut_parts, rows.whole_documents
    num_cut = max((part.rows.stop for part in cut_parts[rows.rank]), default=0)
    if any(cut_parts):  # on one rank: all take part
        length = max(part.rows.stop for parts in cut_parts for part in parts)
        cut = rows._replace(
            query=_first_rows(rows.query, num_cut, length),
            key=_first_rows(rows.key, num_cut, length),
            value=_first_rows(rows.value, num_cut, length),
            parts=cut_parts,
        )
        if by_heads is not None:
            out, lse = _with_other_heads(cut, length, by_heads, by_keys, over_keys)
        else:
            spread = PackedSpread(cut_parts, length, rows.lengths, rows.attention.options.window)
            out, lse = over_keys(*cut[:5], spread, rows.attention, by_keys)
        found.append((out[:, :, :num_cut], lse[:, :, :num_cut]))
    if own_whole:
        found.append(_attend_whole(rows, own_whole))
    num_padding = rows.query.shape[2] - sum(lse.shape[2] for _, lse in found)
    out_shape = (*rows.query.shape[:2], num_padding, rows.value.shape[3])
    lse_dtype = torch.float64 if rows.query.dtype == torch.float64 else torch.float32
    padding = rows.query.new_zeros(out_shape), rows.query.new_full(out_shape[:3], -torch.inf, dtype=lse_dtype)
    out, lse = (torch.cat(of_all, 2) for of_all in zip(*found, padding, strict=True))
    return out, lse


def _first_rows(x: Tensor, num_rows: int, length: int) -> Tensor:
    return F.pad(x[:, :, :num_rows], (0, 0, 0, length - num_rows))


# --- Whole documents --------------------------------------------------------------------------------------------------


def _attend_whole(rows: _Rows, documents: list[Part]) -> tuple[Tensor, Tensor]:
    """In one call. Dropout counts heads over documents: with it, one for each of those that follow each other."""
    options, first_head, all_heads = rows.attention
    has_all_heads = rows.query.shape[1] == all_heads
    calls: list[list[Part]] = []
    for part in documents:
        last = calls[-1][-1].document if calls else None
        follows = last is not None and part.document == last + 1 and has_all_heads
        if calls and (options.dropout_p == 0 or follows):
            calls[-1].append(part)
        else:
            calls.append([part])
    found = []
    for call in calls:
        numbers = [part.document or 0 for part in call]
        own = slice(call[0].rows.start, call[-1].rows.stop)
        query, key, value = (tensor[0, :, own].transpose(0, 1) for tensor in rows[:3])
        slopes = rows.slopes if rows.slopes is None or rows.slopes.dim() == 1 else rows.slopes[numbers]
        lengths = tuple(part.length for part in call)
        offsets = _offsets(lengths, rows.query.device)
        result = attend(
            (query, key, value, None, slopes, rows.sinks, offsets, offsets, None),
            Options(
                *(max(lengths), max(lengths), False, options.window, options.softcap, options.dropout_p, options.scale),
                first_head=numbers[0] * all_heads + first_head,
            ),
            options.dropout_seed,
            options.deterministic,
            return_lse=True,
        )
        found.append((result[0].transpose(0, 1)[None], result[1][None]))
    out, lse = (torch.cat(of_all, 2) if len(found) > 1 else of_all[0] for of_all in zip(*found, strict=True))
    return out, lse


@functools.lru_cache(64)  # layer for layer the same
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


# --- Rows for heads, and back -----------------------------------------------------------------------------------------


def _with_other_heads(
    rows: _Rows, length: int, by_heads: dist.ProcessGroup, by_keys: dist.ProcessGroup | None, over_keys: Any
) -> tuple[Tensor, Tensor]:
    """All ranks of a group give each other their ``length`` rows for some of the heads, attend with these, and back."""
    num_ranks, rank_of_heads = dist.get_world_size(by_heads), dist.get_rank(by_heads)
    arranged = []
    for first in range(0, len(rows.parts), num_ranks):
        members = rows.parts[first : first + num_ranks]
        together = (part.moved(i * length) for i, parts in enumerate(members) for part in parts)
        arranged.append(arrange(together, rows.lengths))
    rank = rows.rank // num_ranks
    index = index_of(arranged[rank][1], rows.query.device)

    def to_heads(x: Tensor) -> Tensor:
        by_rank = all_to_all(x.unflatten(1, (num_ranks, -1)).movedim(1, 0), by_heads)  # [ranks, 1, H, length, D]
        return by_rank.movedim(0, 2).flatten(2, 3).index_select(2, index)

    def back(x: Tensor) -> Tensor:
        all_rows = x.new_zeros(*x.shape[:2], num_ranks * length, x.shape[3]).index_copy(2, index, x)
        return all_to_all(all_rows.unflatten(2, (num_ranks, -1)).movedim(2, 0), by_heads).movedim(0, 1).flatten(1, 2)

    heads = rows.query.shape[1] // num_ranks
    own = slice(rank_of_heads * heads, (rank_of_heads + 1) * heads)
    of_heads = _Rows(
        query=to_heads(rows.query),
        key=to_heads(rows.key),
        value=to_heads(rows.value),
        slopes=None if rows.slopes is None else rows.slopes[..., own],
        sinks=None if rows.sinks is None else rows.sinks[own],
        attention=rows.attention.of_heads(own),
        parts=[parts for parts, _ in arranged],
        lengths=rows.lengths,
        rank=rank,
    )
    out, lse = _attend(of_heads, None, by_keys, over_keys)
    return back(out), back(lse[..., None])[..., 0]
