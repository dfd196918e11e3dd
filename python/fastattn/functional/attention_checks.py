"""Checks the arguments of ``attention`` and ``attention_varlen``, and describes the call for the choice of a
backend."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastattn.call import UNBOUNDED, AttentionCall
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_dtype,
    check_head_counts,
    check_int,
    check_number,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    device_checks_are_on,
    expect,
    numbers_below,
    refuse_wrapped,
)
from fastattn.dispatch.request import Request
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError
from fastattn.functional.checked_once import CheckedOnce
from fastattn.layout import ALIGNMENT_BYTES, reason_to_copy
from fastattn.ops.describe import describe_attention

MOST_RANGES = 4  # the most ranges of keys for a query


def check_call(call: AttentionCall) -> tuple[AttentionCall, Request]:
    """Returns the call with checked options, and its description. Raises if the host can see that an argument is
    wrong."""
    query, key, value, bias, alibi_slopes, sinks = call[:6]
    for name, tensor in zip(call._fields, call.tensors, strict=False):
        refuse_wrapped(name, tensor)
    layouts = ("[total_q, Hq, D]", "[total_k, Hkv, D]", "[total_k, Hkv, Dv]")
    if not call.is_packed:
        layouts = ("[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]")
    elif call.block_table is not None:
        layouts = (layouts[0], "[num_pages, Hkv, page_size, D]", "[num_pages, Hkv, page_size, Dv]")
        if torch.int8 in (key.dtype, value.dtype):
            raise InputError(
                f"key: expected pages of the query's dtype, {query.dtype}, got int8 ones; attention_with_kv_cache "
                "takes those, with their scales"
            )
    check_dtype("query", query, FLOATING)
    for name, tensor, layout in (("query", query, layouts[0]), ("key", key, layouts[1]), ("value", value, layouts[2])):
        advice = ""
        if not call.is_packed and query.dim() == 3:
            advice = "; for one sequence [H, S, D] pass query[None], key[None] and value[None]"
        elif call.is_packed and tensor.dim() == 4:
            ways = f"{name}.flatten(0, 1), for [B, H, S, D] {name}.transpose(1, 2).flatten(0, 1)"
            advice = f"; for [B, S, H, D] pass {ways}"
        check_rank(name, tensor, layout, advice)
        came = f"{tensor.dtype}; cast it with {name}.to({query.dtype})"
        expect(tensor.dtype == query.dtype, name, f"{query.dtype}, as the query is", came)
        check_same_device(name, tensor, query.device)
    heads, head_dim = query.shape[1], query.shape[-1]
    expect(key.shape[-1] == head_dim, "key", f"{layouts[1]} with the query's D = {head_dim}", list(key.shape))
    like_key, value_shape = list(key.shape[:-1]), list(value.shape)
    expect(value_shape[:-1] == like_key, "value", f"{layouts[2]} with the key's {like_key} before Dv", value_shape)
    check_head_counts(query, key, "key", layouts[:2])
    batch = _check_packed(call) if call.is_packed else query.shape[0]
    if not call.is_packed:
        swap = f"; if all sequences share keys, pass key.expand({batch}, -1, -1, -1), and values likewise"
        came = f"{list(key.shape)}{swap if key.shape[0] == 1 else ''}"
        expect(key.shape[0] == batch, "key", f"{layouts[1]} with the query's batch size {batch}", came)

    left, right = check_window(call.window)
    causal = check_bool("causal", call.causal)
    softcap = float(check_number("softcap", call.softcap, low=0.0))
    dropout_p = float(check_number("dropout_p", call.dropout_p, low=0.0, high=1.0))
    scale = default_scale(head_dim) if call.scale is None else float(check_number("scale", call.scale))
    if bias is not None:
        check_bias(bias, query, (batch, heads, query.shape[2], key.shape[2]))
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, query.device, batch, heads)
    if sinks is not None:
        check_sinks(sinks, query.device, heads)
    if call.key_ranges is not None:
        check_shape_of_ranges(call.key_ranges, query, call.is_packed)
    checked = call._replace(
        max_seqlen_q=check_int("max_seqlen_q", call.max_seqlen_q, minimum=0),
        max_seqlen_k=check_int("max_seqlen_k", call.max_seqlen_k, minimum=0),
        causal=False,
        window=(left, 0 if causal else right),
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=check_bool("return_lse", call.return_lse),
        return_max_logit=check_bool("return_max_logit", call.return_max_logit),
        deterministic=None if call.deterministic is None else check_bool("deterministic", call.deterministic),
        batch_invariant=check_bool("batch_invariant", call.batch_invariant),
    )
    return checked, describe_attention(checked)


check_once = CheckedOnce(check_call, AttentionCall, first_option="max_seqlen_q", end="first_row")


def _check_packed(call: AttentionCall) -> int:
    """Checks the offsets and the block table of packed sequences, and returns the number of sequences."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    device = call.query.device
    check_rank("cu_seqlens_q", call.cu_seqlens_q, "[B + 1]")
    batch = call.cu_seqlens_q.shape[0] - 1
    for name, offsets in (("cu_seqlens_q", call.cu_seqlens_q), ("cu_seqlens_k", call.cu_seqlens_k)):
        check_dtype(name, offsets, (torch.int32,))
        check_same_device(name, offsets, device)
        expect(offsets.shape[0] >= 1, name, "offsets [B + 1], at least one", "none")
        check_shape(name, offsets, (batch + 1,), "[B + 1] like cu_seqlens_q")
    table = call.block_table
    if table is not None:
        check_rank("block_table", table, "[B, max_pages]")
        check_dtype("block_table", table, (torch.int32,))
        check_same_device("block_table", table, device)
        expected = f"[B, max_pages] with the B = {batch} of cu_seqlens_q"
        expect(table.shape[0] == batch, "block_table", expected, list(table.shape))
    return batch


def default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


def check_window(window: Any) -> tuple[int, int]:
    """Checks and returns ``(left, right)``, each at least -1."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        advice = f"; for no window pass ({UNBOUNDED}, {UNBOUNDED})"
        if isinstance(window, int) and window > 0 and not isinstance(window, bool):
            advice = f"; ({window - 1}, 0) lets a query see {window} keys up to its own"
        raise InputError(f"window: expected (left, right), got {window!r}{advice}")
    expected = f"two ints of at least {UNBOUNDED}, which means unbounded"
    expect(None not in window, "window", expected, window)
    left, right = (check_int(f"window[{i}]", side) for i, side in enumerate(window))
    expect(left >= UNBOUNDED and right >= UNBOUNDED, "window", expected, window)
    return left, right


def check_bias(bias: Any, query: Tensor, full: tuple[int, ...]) -> None:
    """Checks that ``bias`` is ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``, and bool, float32 or of the query's dtype."""
    check_tensor("bias", bias, optional=True)
    check_same_device("bias", bias, query.device)
    layout, dtypes = "[B or 1, Hq or 1, Sq or 1, Sk or 1]", (torch.bool, *dict.fromkeys((query.dtype, torch.float32)))
    is_mask = bias.dtype == torch.bool or not (bias.is_floating_point() or bias.is_complex())
    if bias.dim() == 2:
        came, as_bool = f"{bias.dtype} {list(bias.shape)}", "" if bias.dtype == torch.bool or not is_mask else ".bool()"
        if tuple(bias.shape) == full[2:]:
            came += f"; for one [Sq, Sk] pass bias[None, None]{as_bool}"
        if tuple(bias.shape) == (full[0], full[3]):
            as_bool = "" if bias.dtype == torch.bool else ".bool()"
            came += f"; for a padding mask [B, Sk], 1 for tokens, pass bias[:, None, None, :]{as_bool}"
        expect(False, "bias", f"a bool or floating {layout}", came)
    is_of_sequences = bias.dim() == 3 and tuple(bias.shape) == (full[0], *full[2:])
    advice = "; for one mask [Sq, Sk] per sequence pass bias[:, None]" if is_of_sequences else ""
    check_rank("bias", bias, layout, advice)
    if is_mask and bias.dtype != torch.bool:
        expected = " or ".join(map(str, dtypes))
        expect(False, "bias", expected, f"{bias.dtype}; if 1 means that a query sees a key, pass bias.bool()")
    check_dtype("bias", bias, dtypes, f"; cast it with bias.to({query.dtype})")
    fits = all(size in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
    expect(fits, "bias", f"each dimension 1 or that of [B, Hq, Sq, Sk] = {list(full)}", list(bias.shape))


def check_slopes(slopes: Any, device: torch.device, batch: int, heads: int) -> None:
    """Checks that ``slopes`` are floating ``[Hq]`` or ``[B, Hq]``."""
    check_tensor("alibi_slopes", slopes, optional=True)
    check_same_device("alibi_slopes", slopes, device)
    check_dtype("alibi_slopes", slopes, FLOATING)
    fits = tuple(slopes.shape) in ((heads,), (batch, heads))
    expect(fits, "alibi_slopes", f"shape [Hq] = [{heads}] or [B, Hq] = [{batch}, {heads}]", list(slopes.shape))


def check_sinks(sinks: Any, device: torch.device, heads: int) -> None:
    """Checks that ``sinks`` are floating ``[Hq]``."""
    check_tensor("sinks", sinks, optional=True)
    check_same_device("sinks", sinks, device)
    check_dtype("sinks", sinks, FLOATING)
    check_shape("sinks", sinks, (heads,), "[Hq]")


def check_shape_of_ranges(ranges: Any, query: Tensor, is_packed: bool) -> None:
    """Checks that ``ranges`` are int32 ``[B or 1, Hq or 1, Sq, R, 2]``, or packed ``[Hq or 1, total_q, R, 2]``."""
    check_tensor("key_ranges", ranges, optional=True)
    check_same_device("key_ranges", ranges, query.device)
    layout = "[Hq or 1, total_q, R, 2]" if is_packed else "[B or 1, Hq or 1, Sq, R, 2]"
    check_rank("key_ranges", ranges, layout)
    check_dtype("key_ranges", ranges, (torch.int32,))
    whole = [query.shape[1], query.shape[0]] if is_packed else list(query.shape[:3])
    came, shared = list(ranges.shape), len(whole) - 1
    fits = all(size in (1, own) for size, own in zip(came[:shared], whole, strict=False)) and came[shared] == whole[-1]
    expect(fits and came[-1] == 2, "key_ranges", f"{layout} for a query {list(query.shape)}", came)
    expect(1 <= came[-2] <= MOST_RANGES, "key_ranges", f"1 to {MOST_RANGES} ranges for each query", came[-2])


def check_ranges(ranges: Any, num_keys: int | Tensor) -> None:
    """Checks that the ranges ``[…, rows, R, 2]`` of each row do not overlap and are within ``num_keys``, an int or
    ``[rows]``. Reads the ranges' values: call it only if `contents_are_checked`, and not under ``torch.func``."""
    begin, end = ranges.unbind(-1)
    if isinstance(num_keys, Tensor):
        num_keys = num_keys[:, None]
    is_wrong = (begin < 0) | (begin > end) | (end > num_keys)
    if bool(is_wrong.any()):
        index = is_wrong.nonzero()[0].tolist()
        row, wrong = index[:-1], ranges[tuple(index)].tolist()
        most = num_keys if isinstance(num_keys, int) else int(num_keys[row[-1]])
        expected = f"0 <= begin <= end <= {most}, the number of keys"
        raise InputError(f"key_ranges: expected {expected}, got {wrong} at key_ranges{row}")
    # Sort each row's ranges by their beginning, with empty ranges last.
    order = torch.where(begin < end, begin, torch.iinfo(torch.int32).max).argsort(-1)
    begin, end = begin.gather(-1, order), end.gather(-1, order)
    overlap = (begin[..., 1:] < end[..., :-1]) & (begin[..., 1:] < end[..., 1:])
    if bool(overlap.any()):
        row = overlap.nonzero()[0].tolist()[:-1]
        raise InputError(
            f"key_ranges: expected ranges that do not overlap, got {ranges[tuple(row)].tolist()} at key_ranges{row}; "
            "join such ranges to one, or end the first where the second begins"
        )


def check_uncopied(why: str, **caches: Tensor) -> None:
    """Raises if a kernel cannot read a cache in place. ``why``, the reason not to copy the cache, is part of the
    error."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return  # a traced or wrapped tensor has no address
    if torch._C._len_torch_dispatch_stack() > 0:
        return  # nor has a fake tensor
    for name, cache in caches.items():
        reason = reason_to_copy(cache)
        if reason is not None:
            wanted = f"a contiguous last dimension, and base and strides that are multiples of {ALIGNMENT_BYTES} bytes"
            came = f"strides {cache.stride()}: {reason}; allocate it with torch.zeros, with rows padded to 16 bytes"
            raise InputError(f"{name}: expected {wanted}, since {why}, got {came}")


def check_pages(block_table: Tensor, lengths: Tensor, num_pages: int, page_size: int) -> None:
    """Checks that the pages of all tokens exist. Reads the table's values: call it only if `contents_are_checked`."""
    first_token = torch.arange(block_table.shape[1], device=block_table.device) * page_size
    is_used = first_token < lengths[:, None]
    wrong = is_used & ((block_table < 0) | (block_table >= num_pages))
    if bool(wrong.any()):
        sequence, page = wrong.nonzero()[0].tolist()
        came = f"{int(block_table[sequence, page])} as page {page} of sequence {sequence}"
        expect(False, "block_table", numbers_below(num_pages, "pages"), came)


def check_offsets(name: str, offsets: Tensor, packed: Tensor | None, max_seqlen: int) -> None:
    """Checks that offsets stay within the rows of ``packed`` (None: keys in pages), and lengths within ``max_seqlen``.

    Reads the offsets' values: call it only if `contents_are_checked`. Rows that belong to no sequence, such as the end
    of a padded buffer, raise only with ``FASTATTN_CHECK=1``.
    """
    values = offsets.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    advice = "; for lengths pass F.pad(lengths.cumsum(0), (1, 0)).int()"
    are_lengths = packed is not None and values[0] > 0 and sum(values) == packed.shape[0]
    expect(not are_lengths, name, "offsets, which begin with 0", f"{values}{advice}")
    expect(min(lengths, default=0) >= 0, name, "offsets that do not decrease", values)
    if packed is not None:
        total, last = packed.shape[0], values[-1]
        swap = "; if heads come before rows, pass query.transpose(0, 1) and so on"
        came = f"{last}{swap if last == packed.shape[1] != total else ''}"
        if device_checks_are_on():
            expect(values[0] == 0, name, "0 as the first offset", f"{values[0]}{advice}")
            expect(last == total, name, f"{total} (the number of rows) as the last offset", came)
        expect(values[0] >= 0, name, "0 or more as the first offset", values[0])
        if values[0] > 0:
            missed = f"{name} begins with {values[0]}, so the first {values[0]} rows belong to no sequence and are zero"
            warn_at_users_line(f"attention_varlen: {missed}; offsets begin with 0{advice}.", UserWarning)
        rows = f"at most {total} (dim 0 of the packed [total, H, D])"
        expect(last <= total, name, f"{rows} as the last offset", came)
    longest, max_name = max(lengths, default=0), name.replace("cu", "max").replace("seqlens", "seqlen")
    expect(longest <= max_seqlen, max_name, f"at least {longest}, the longest sequence in {name}", max_seqlen)
