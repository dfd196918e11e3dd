"""Checks of the arguments of ``attention`` and ``attention_varlen``, and what the host can conclude from them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

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
    needs_gradient,
    refuse_wrapped,
)
from fastattn.dispatch.call import Call
from fastattn.dispatch.reasons import only_torch_handles
from fastattn.errors import InputError
from fastattn.functional.torch_sdpa import can_express
from fastattn.layout import ALIGNMENT_BYTES, reason_to_copy

UNBOUNDED = -1


# query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table
Tensors: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]


class Options(NamedTuple):
    """The options as the user gave them."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: Any
    softcap: float
    dropout_p: float
    scale: float | None
    return_max_logit: bool = False
    first_head: int = 0  # the number of the first head in a larger call, by which dropout draws; not the user's


class CheckedCall(NamedTuple):
    """The result of checking one signature of arguments, which is kept for later calls."""

    call: Call
    max_seqlens: tuple[int, int]
    scale: float
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    needs_grad: bool
    torch_can: bool


def check_call(tensors: Tensors, options: Options) -> CheckedCall:
    """Checks the arguments, and raises where the host can see that one is wrong."""
    names = ("query", "key", "value", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale, return_max_logit, _ = options
    packed = cu_seqlens_q is not None
    for name, tensor in zip(names, tensors, strict=True):
        refuse_wrapped(name, tensor)
    layouts = ("[total_q, Hq, D]", "[total_k, Hkv, D]", "[total_k, Hkv, Dv]")
    if not packed:
        layouts = ("[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]")
    elif block_table is not None:
        layouts = (layouts[0], "[num_pages, Hkv, page_size, D]", "[num_pages, Hkv, page_size, Dv]")
        if torch.int8 in (key.dtype, value.dtype):
            raise InputError(
                f"key: expected pages of the query's dtype, {query.dtype}, got int8 ones; attention_with_kv_cache "
                "takes those, with their scales"
            )
    check_dtype("query", query, FLOATING)
    for name, tensor, layout in (("query", query, layouts[0]), ("key", key, layouts[1]), ("value", value, layouts[2])):
        check_rank(name, tensor, layout)
        check_dtype(name, tensor, (query.dtype,))
        check_same_device(name, tensor, query.device)
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[-1]
    expect(key.shape[-1] == head_dim, "key", f"the query's head dim {head_dim}", key.shape[-1])
    expect(
        value.shape[:-1] == key.shape[:-1],
        "value",
        f"the key's shape but for Dv, {list(key.shape[:-1])}",
        list(value.shape[:-1]),
    )
    check_head_counts(query, key, "key", layouts[:2])
    if packed:
        assert cu_seqlens_k is not None
        check_rank("cu_seqlens_q", cu_seqlens_q, "[B + 1]")
        batch = cu_seqlens_q.shape[0] - 1
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_dtype(name, offsets, (torch.int32,))
            check_same_device(name, offsets, query.device)
            expect(offsets.shape[0] >= 1, name, "at least one offset", 0)
            check_shape(name, offsets, (batch + 1,), "[B + 1]")
        max_seqlen_q = check_int("max_seqlen_q", max_seqlen_q, minimum=0)
        max_seqlen_k = check_int("max_seqlen_k", max_seqlen_k, minimum=0)
        if block_table is not None:
            check_rank("block_table", block_table, "[B, max_pages]")
            check_dtype("block_table", block_table, (torch.int32,))
            check_same_device("block_table", block_table, query.device)
            rows = list(block_table.shape)
            expect(block_table.shape[0] == batch, "block_table", f"{batch} rows [B, max_pages]", rows)
        sizes = (batch, heads, kv_heads, max_seqlen_q, max_seqlen_k)
    else:
        batch = query.shape[0]
        expect(key.shape[0] == batch, "key", f"the query's batch size {batch}", key.shape[0])
        sizes = (batch, heads, kv_heads, query.shape[2], key.shape[2])

    features = set()
    left, right = check_window(window)
    causal = check_bool("causal", causal)
    if causal:
        right = 0
    if right == 0:  # by ``causal``, or by a window that means the same
        features.add("causal")
    if left >= 0 or right > 0:
        features.add("window")
    softcap = float(check_number("softcap", softcap, low=0.0))
    if softcap > 0:
        features.add("softcap")
    dropout_p = float(check_number("dropout_p", dropout_p, low=0.0, high=1.0))
    if dropout_p > 0:
        features.add("dropout")
    scale = default_scale(head_dim) if scale is None else float(check_number("scale", scale))
    if bias is not None:
        check_bias(bias, query, (batch, heads, query.shape[2], key.shape[2]))
        features.add("mask" if bias.dtype == torch.bool else "bias")
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, query.device, batch, heads)
        features.add("alibi")
    if sinks is not None:
        check_sinks(sinks, query.device, heads)
        features.add("sinks")
    needs_grad = torch.is_grad_enabled() and any(map(needs_gradient, tensors[:6]))
    if needs_grad:
        features.add("gradients")
        if needs_gradient(bias):
            features.add("bias gradients")
        if needs_gradient(alibi_slopes):
            features.add("slope gradients")
    if heads != kv_heads:
        features.add("gqa")
    if value.shape[-1] != head_dim:
        features.add("value dim")
    if check_bool("return_max_logit", return_max_logit):
        features.add("max logit")
    if packed:
        features.add("varlen")
    if block_table is not None:
        features.update(("paged", "paged gradients") if needs_grad else ("paged",))
    call = Call(
        "attention",
        query.device,
        query.dtype,
        head_dim,
        value.shape[-1],
        frozenset(features),
        sizes,
        only_torch_handles(*tensors),
    )
    torch_can = can_express(call, key.shape[0 if packed else 2], scale, bias)
    return CheckedCall(
        call,
        (max_seqlen_q, max_seqlen_k),
        scale,
        (left, right),
        softcap,
        dropout_p,
        needs_grad,
        torch_can,
    )


def default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


def check_window(window: Any) -> tuple[int, int]:
    """Checks and returns ``(left, right)``, each at least -1."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        advice = ""
        if isinstance(window, int) and window > 0 and not isinstance(window, bool):
            advice = f"; ({window - 1}, 0) lets a query see {window} keys up to its own"
        raise InputError(f"window: expected (left, right), got {window!r}{advice}")
    left, right = (check_int("window", side, minimum=UNBOUNDED) for side in window)
    return left, right


def check_bias(bias: Any, query: Tensor, full: tuple[int, ...]) -> None:
    """Checks that ``bias`` is ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``, and bool, float32 or of the query's dtype."""
    check_tensor("bias", bias, optional=True)
    check_same_device("bias", bias, query.device)
    layout, dtypes = "[B or 1, Hq or 1, Sq or 1, Sk or 1]", (torch.bool, *dict.fromkeys((query.dtype, torch.float32)))
    is_mask = bias.dtype == torch.bool or not (bias.is_floating_point() or bias.is_complex())
    if is_mask and tuple(bias.shape) == (full[0], full[3]):
        padding = "mask[:, None, None, :]" + ("" if bias.dtype == torch.bool else ".bool()")
        came = f"{bias.dtype} {list(bias.shape)}; of a padding mask [B, Sk], 1 for tokens, pass {padding}"
        expect(False, "bias", f"a bool or floating {layout}", came)
    if is_mask and bias.dtype != torch.bool:
        expected = " or ".join(map(str, dtypes))
        expect(False, "bias", expected, f"{bias.dtype}; of a mask that is 1 where a query sees a key, pass mask.bool()")
    check_rank("bias", bias, layout)
    check_dtype("bias", bias, dtypes)
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


def check_uncopied(name: str, cache: Tensor, why: str) -> None:
    """Raises where a kernel cannot read a cache without a copy; ``why`` says in the error why it is not copied."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return  # a traced or wrapped tensor has no address
    reason = reason_to_copy(cache)
    if reason is not None:
        wanted = f"a contiguous last dimension, and base and strides that are multiples of {ALIGNMENT_BYTES} bytes"
        raise InputError(f"{name}: expected {wanted}, since {why}, got strides {cache.stride()}: {reason}")


def check_pages(block_table: Tensor, lengths: Tensor, num_pages: int, page_size: int) -> None:
    """Checks that the pages of all tokens exist. It reads the table back, so call it only if `places_are_checked`."""
    first_token = torch.arange(block_table.shape[1], device=block_table.device) * page_size
    is_used = first_token < lengths[:, None]
    wrong = is_used & ((block_table < 0) | (block_table >= num_pages))
    if bool(wrong.any()):
        sequence, page = wrong.nonzero()[0].tolist()
        came = f"{int(block_table[sequence, page])} as page {page} of sequence {sequence}"
        expect(False, "block_table", f"pages from 0 to {num_pages - 1}", came)


def check_offsets(name: str, offsets: Tensor, total: int | None, max_seqlen: int) -> None:
    """Checks offsets against ``total`` packed rows (None: there is no packed tensor) and the longest length.

    It reads the offsets back, so call it only if `places_are_checked`. Rows that belong to no sequence, such as the end
    of a padded buffer, are refused only with ``FASTATTN_CHECK=1``.
    """
    values = offsets.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    expect(min(lengths, default=0) >= 0, name, "offsets that do not decrease", values)
    if total is not None:
        if device_checks_are_on():
            expect(values[0] == 0, name, "0 as the first offset", values[0])
            expect(values[-1] == total, name, f"{total} (the number of rows) as the last offset", values[-1])
        expect(values[0] >= 0, name, "0 or more as the first offset", values[0])
        expect(values[-1] <= total, name, f"at most {total} (the number of rows) as the last offset", values[-1])
    longest = max(lengths, default=0)
    expect(
        longest <= max_seqlen, name.replace("cu", "max").replace("seqlens", "seqlen"), f"at least {longest}", max_seqlen
    )
