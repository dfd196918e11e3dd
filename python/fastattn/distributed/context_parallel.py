"""Computes attention over a sequence, or over packed sequences, whose rows are spread over ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Generic, TypeVar, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Never, Unpack  # a dependency of torch

from fastattn.call import UNBOUNDED, AttentionCall
from fastattn.checks import (
    check_rank,
    check_tensor,
    contents_are_checked,
    device_checks_are_on,
    expect,
    refuse_keywords,
    type_name,
)
from fastattn.distributed.arguments import prepared
from fastattn.distributed.blocks import KEYS_OF_A_DRAW, Block, Part, spread_of
from fastattn.distributed.collectives import Group, process_groups, to_all_heads, to_own_heads
from fastattn.distributed.local_attention import Inputs, joined
from fastattn.distributed.over_keys import attend_over_keys
from fastattn.distributed.packed import PackedLayout, PackedShards
from fastattn.distributed.sequence import in_order_of_parts, in_order_of_ranks, parts_per_rank
from fastattn.functional.attention import AttentionOptions, No, Yes, attend
from fastattn.functional.attention_checks import check_ranges, check_shape_of_ranges, check_slopes

_Lse = TypeVar("_Lse")


class _PackedOptions(AttentionOptions, Generic[_Lse], total=False):
    return_lse: _Lse
    key_ranges: Tensor | None
    strategy: str


class _DenseOptions(_PackedOptions[_Lse], total=False):
    group: Group
    layout: str


@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_DenseOptions[No]]
) -> Tensor: ...
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[_DenseOptions[Yes]]
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
    key_ranges: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes this rank's rows of ``fastattn.attention`` over a sequence that is spread over ranks.

    All ranks of the group make this call, each with its own parts of query, key and value, as ``shard_sequence``
    returns them. The gradients of these parts are the gradients of the sum of all ranks' losses. ``alibi_slopes`` and
    ``sinks`` must be the same on every rank; the sum of their gradients over the ranks is the whole gradient. Results
    and gradients over the keys of different ranks are merged in float32.

    Args:
        query: ``[B, Hq, S / W, D]``; key: ``[B, Hkv, S / W, D]``; value: ``[B, Hkv, S / W, Dv]``, on W ranks.
        group: a process group, a mesh of one or two dimensions, or None for the default group. In a mesh of two
            dimensions, ranks along the second dimension exchange rows for heads, as with ``"ulysses"``, and ranks along
            the first dimension follow ``strategy``.
        strategy: ``"ring"``: each rank attends to the keys and values of one rank at a time, while the keys and values
            of the next rank arrive (Liu et al., "Ring attention", 2023).
            ``"allgather"``: each rank gathers all keys and values, some heads at a time, and attends to them with its
            own queries. If a window hides most keys, it gathers only the visible ones.
            ``"ulysses"``: ranks exchange rows for heads, attend over the whole sequence with some of the heads, and
            exchange the results back (Jacobs et al., "DeepSpeed Ulysses", 2023). W must divide Hq and Hkv.
        layout: ``"contiguous"`` or ``"zigzag"``: see ``shard_sequence``.
        causal, window, softcap, alibi_slopes, sinks, dropout_p, scale, return_lse, deterministic: as in
            ``fastattn.attention``, by positions in the whole sequence.
        key_ranges: int32 ``[B or 1, Hq or 1, S / W, R, 2]``: the ranges of this rank's rows, as
            ``shard_sequence(ranges, 2, layout=…)`` returns them, in positions of the whole sequence. Ranges
            save computation but no communication: a rank still receives all keys within the window.
        dropout_seed: the same on all ranks; if None, the first rank draws one. The dropout mask does not depend on the
            number of ranks.

    Returns:
        ``[B, Hq, S / W, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, S / W]``.

    Raises:
        InputError, TypeError: as ``fastattn.attention``; also for a group that is not initialised, an odd number of
            rows with ``"zigzag"``, and heads that are no multiple of the ranks that exchange rows for heads. With
            ``FASTATTN_CHECK=1``, all ranks raise an error if one rank's arguments are wrong, or if shapes or options
            differ between ranks. Otherwise the ranks without an error wait for the others.
    """
    if unknown:
        refuse_keywords(context_parallel_attention, unknown)
    groups = process_groups(group)
    call = AttentionCall(
        query,
        key,
        value,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_ranges=key_ranges,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        dropout_seed=dropout_seed,
    )

    def check() -> dict[str, Any]:
        _check_parts(query, key, value, layout)
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.device, *query.shape[:2])
        if dropout_p > 0 and strategy == "ring":
            rows = query.shape[2] * math.prod(map(dist.get_world_size, groups[1:])) // parts_per_rank(layout)
            parts = f"parts of a multiple of {KEYS_OF_A_DRAW} rows for dropout with strategy 'ring'"
            expect(rows % KEYS_OF_A_DRAW == 0, "query", parts, f"{rows}; pad the sequence, or use strategy 'allgather'")
        if key_ranges is not None:
            check_shape_of_ranges(key_ranges, query, is_packed=False)
        if key_ranges is not None and contents_are_checked(key_ranges):
            check_ranges(key_ranges, query.shape[2] * math.prod(map(dist.get_world_size, groups)))
        return {"layout": layout}

    inputs, by_heads, by_keys = prepared(call, strategy, groups, check)
    if by_heads is not None:
        inputs = inputs.exchanged(by_heads, partial(_to_whole_sequence, group=by_heads, layout=layout))
    out, lse = _attend_alone(inputs) if by_keys is None else _attend_over_keys(inputs, layout, by_keys, strategy)
    if by_heads is not None:
        out = _to_own_rows(out, by_heads, layout)
        if return_lse:
            lse = _to_own_rows(lse[..., None], by_heads, layout)[..., 0]
    return (out, lse) if return_lse else out


def _check_parts(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    parts = parts_per_rank(layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        check_rank(name, tensor, "[B, H, S / W, D]")
        fits = (tensor.shape[0], tensor.shape[2]) == (query.shape[0], query.shape[2])
        expect(fits, name, f"batch {query.shape[0]} and {query.shape[2]} rows, like query", list(tensor.shape))
    came = f"{query.shape[2]}; pad the sequence before shard_sequence"
    expect(query.shape[2] % parts == 0, "query", f"a multiple of {parts} rows for {layout}", came)


@torch.compiler.disable  # asynchronous messages cannot be traced, so a compiled graph breaks here
def _attend_over_keys(inputs: Inputs, layout: str, by_keys: dist.ProcessGroup, strategy: str) -> tuple[Tensor, Tensor]:
    options = inputs.attention.options
    uses_positions = inputs.slopes is not None or options.key_ranges is not None or options.dropout_p > 0
    world_size, num_rows = dist.get_world_size(by_keys), inputs.query.shape[2]
    spread = spread_of(layout, world_size, num_rows, options.window, uses_positions)
    return attend_over_keys(inputs, spread, by_keys, strategy)


# --- Exchange of rows for heads, and back -----------------------------------------------------------------------------


def _attend_alone(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Attends over the whole sequence with this rank's heads."""
    attention = inputs.attention.with_options(alibi_slopes=inputs.slopes, sinks=inputs.sinks, return_lse=True)
    whole = Block(slice(None), slice(0, inputs.key.shape[2]), None, 0, attention.options.window)
    results: list[Any] = [attend(call) for call in attention.calls(*inputs[:3], whole)]
    return joined(results, 0)


def _to_whole_sequence(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """Turns each rank's ``[B, H, S / W, D]`` into ``[B, H / W, S, D]``, with the parts of the sequence in order."""
    return in_order_of_parts(to_own_heads(x, group), 2, layout, dist.get_world_size(group))


def _to_own_rows(x: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
    """Undoes ``_to_whole_sequence``: turns ``[B, H / W, S, D]`` into each rank's ``[B, H, S / W, D]``."""
    return to_all_heads(in_order_of_ranks(x, 2, layout, dist.get_world_size(group)), group)


# --- packed sequences, here called documents --------------------------------------------------------------------------


@overload
def context_parallel_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, shards: PackedShards, **options: Unpack[_PackedOptions[No]]
) -> Tensor: ...
@overload
def context_parallel_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, shards: PackedShards, **options: Unpack[_PackedOptions[Yes]]
) -> tuple[Tensor, Tensor]: ...


@torch.compiler.disable  # messages and kernels depend on the lengths, so a compiled graph breaks here
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
    key_ranges: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes this rank's rows of ``fastattn.attention_varlen`` over packed sequences that are spread over ranks.

    A rank attends to sequences that it holds whole without communication; ``strategy`` applies to sequences that are
    cut. Gradients are as in ``context_parallel_attention``.

    Args:
        query: ``[num_rows, Hq, D]``; key: ``[num_rows, Hkv, D]``; value: ``[num_rows, Hkv, Dv]``: this rank's rows, as
            ``shards.shard`` returns them. The contents of padding have no influence.
        shards: the assignment of rows to the ranks of a group, from ``shard_varlen``.
        strategy: as for ``context_parallel_attention``.
        alibi_slopes: ``[Hq]``, or ``[B, Hq]`` for all B sequences of all ranks.
        causal, window, softcap, sinks, dropout_p, scale, return_lse, deterministic: as in
            ``fastattn.attention_varlen``.
        key_ranges: int32 ``[Hq or 1, num_rows, R, 2]``: the ranges of this rank's rows, as ``shards.shard(ranges, 1)``
            returns them. Key 0 is the first key of a row's sequence.
        dropout_seed: the same on all ranks; if None, the first rank draws one. The dropout mask does not depend on the
            assignment of rows to ranks.

    Returns:
        ``[num_rows, Hq, Dv]``, and with ``return_lse`` the lse, ``[Hq, num_rows]``. Padding rows have output 0,
        lse -inf.

    Raises:
        InputError, TypeError: as ``context_parallel_attention``; also if a tensor does not have ``shards.num_rows``
            rows.
    """
    if unknown:
        refuse_keywords(context_parallel_attention_varlen, unknown)
    expect(isinstance(shards, PackedShards), "shards", "what shard_varlen(cu_seqlens) returns", type_name(shards))
    groups = process_groups(shards.group)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        check_rank(name, tensor, "[num_rows, H, D]")
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if key_ranges is not None:
        check_tensor("key_ranges", key_ranges)
        check_rank("key_ranges", key_ranges, "[Hq or 1, num_rows, R, 2]")
        key_ranges = key_ranges[None]
    call = AttentionCall(
        query,
        key,
        value,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_ranges=key_ranges,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        dropout_seed=dropout_seed,
    )

    def check() -> dict[str, Any]:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            came = f"{tensor.shape[2]}; shards.shard(x) gives this rank's rows of x"
            expect(tensor.shape[2] == shards.num_rows, name, f"the {shards.num_rows} rows of shards", came)
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.device, len(shards.layout.lengths), query.shape[1])
        if key_ranges is not None:
            check_shape_of_ranges(key_ranges[0], query[0].transpose(0, 1), is_packed=True)
        if key_ranges is not None and contents_are_checked(key_ranges):
            lengths = torch.tensor([*shards.layout.lengths, 2**31 - 1])  # padding has index -1, the last entry
            check_ranges(key_ranges[0], lengths[shards.sequences()].to(key_ranges.device))
        return {"shards": repr(shards.layout.parts) if device_checks_are_on() else None}

    inputs, by_heads, by_keys = prepared(call, strategy, groups, check)
    out, lse = _attend_to_rows(inputs, shards.layout, shards.rank, by_heads, by_keys, strategy)
    return (out[0].transpose(0, 1), lse[0]) if return_lse else out[0].transpose(0, 1)


def _attend_to_rows(
    inputs: Inputs,
    layout: PackedLayout,
    rank: int,
    by_heads: dist.ProcessGroup | None,
    by_keys: dist.ProcessGroup | None,
    strategy: str,
) -> tuple[Tensor, Tensor]:
    """Returns output and lse of the rows that ``layout`` assigns to ``rank``, including padding.

    The ranks of ``by_heads`` exchange rows for heads, and the ranks of ``by_keys`` exchange keys. A group is None if no
    ranks do so.
    """
    found = []
    num_cut = max((part.rows.stop for part in layout.cut_parts[rank]), default=0)
    if layout.cut_rows > 0:  # if any rank has rows of cut documents, all ranks take part
        padding = (0, 0, 0, layout.cut_rows - num_cut)
        query, key, value = (F.pad(tensor[:, :, :num_cut], padding) for tensor in inputs[:3])
        ranges = inputs.attention.options.key_ranges
        if ranges is not None:
            ranges = F.pad(ranges[:, :, :num_cut], (0, 0, 0, 0, 0, layout.cut_rows - num_cut))
        cut = Inputs(query, key, value, *inputs[3:5], inputs.attention.with_options(key_ranges=ranges))
        if by_heads is not None:
            out, lse = _with_other_heads(cut, layout, rank, by_heads, by_keys, strategy)
        else:
            assert by_keys is not None  # ranks that exchange neither rows nor keys have no cut documents
            out, lse = attend_over_keys(cut, layout.spread(inputs.attention.options.window), by_keys, strategy)
        found.append((out[:, :, :num_cut], lse[:, :, :num_cut]))
    if whole := [part for part in layout.parts[rank] if layout.is_whole(part)]:
        found.append(_attend_whole(inputs, layout, whole))
    found.append(_padding(inputs, inputs.query.shape[2] - sum(lse.shape[2] for _, lse in found)))
    return joined(found, 2)


def _padding(inputs: Inputs, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns output 0 and lse -inf for padding rows.

    Both depend on all input tensors, so that a rank with only padding computes gradients too, because DDP waits for the
    gradients of every rank.
    """
    query = inputs.query
    shape = (*query.shape[:2], num_rows, inputs.value.shape[3])
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    tensors = [tensor for tensor in inputs[:5] if tensor is not None]
    nothing = torch.stack([tensor[..., :0].sum().to(lse_dtype) for tensor in tensors]).sum()  # empty views: no copies
    out = query.new_zeros(shape) + nothing.to(query.dtype)
    return out, query.new_full(shape[:3], -torch.inf, dtype=lse_dtype) + nothing


# --- Whole documents --------------------------------------------------------------------------------------------------


def _attend_whole(inputs: Inputs, layout: PackedLayout, documents: list[Part]) -> tuple[Tensor, Tensor]:
    """Attends to whole documents, in one call if there is no dropout.

    The dropout pattern depends on the number of a head, and heads are numbered through all documents. So with dropout,
    a call takes several documents only if they are consecutive and the rank has all heads.
    """
    options, first_head, all_heads, _ = inputs.attention
    has_all_heads = inputs.query.shape[1] == all_heads
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
        numbers = tuple(part.document or 0 for part in call)
        offsets, number_tensor = layout.offsets(numbers, inputs.query.device)
        own = slice(call[0].rows.start, call[-1].rows.stop)
        query, key, value = (tensor[0, :, own].transpose(0, 1) for tensor in inputs[:3])
        slopes, longest = inputs.slopes, max(part.length for part in call)
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, number_tensor)
        own_call = options.with_tensors((query, key, value, None, slopes, inputs.sinks, offsets, offsets))
        ranges = options.key_ranges
        result = attend(
            own_call._replace(
                key_ranges=None if ranges is None else ranges[0, :, own],
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                return_lse=True,
                first_head=numbers[0] * all_heads + first_head,
            )
        )
        found.append((result[0].transpose(0, 1)[None], result[1][None]))
    return joined(found, 2)


# --- Exchange of packed rows for heads, and back ----------------------------------------------------------------------


def _with_other_heads(
    inputs: Inputs,
    layout: PackedLayout,
    rank: int,
    by_heads: dist.ProcessGroup,
    by_keys: dist.ProcessGroup | None,
    strategy: str,
) -> tuple[Tensor, Tensor]:
    """Exchanges rows for heads among the ranks of ``by_heads``, attends with its own heads, and exchanges back."""
    num_ranks = dist.get_world_size(by_heads)
    group = rank // num_ranks
    layout_of_groups, index = layout.exchanged(num_ranks, group, inputs.query.device)

    def back(x: Tensor) -> Tensor:
        all_rows = x.new_zeros(*x.shape[:2], num_ranks * layout.cut_rows, x.shape[3])
        return to_all_heads(all_rows.index_copy(2, index, x), by_heads)

    exchanged = inputs.exchanged(by_heads, lambda x: to_own_heads(x, by_heads).index_select(2, index))
    out, lse = _attend_to_rows(exchanged, layout_of_groups, group, None, by_keys, strategy)
    return back(out), back(lse[..., None])[..., 0]
