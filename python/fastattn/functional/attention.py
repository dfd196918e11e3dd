"""Attention with every option, over dense and over packed sequences."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastattn import reference
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_dtype,
    check_int,
    check_number,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    device_checks_are_on,
    expect,
)
from fastattn.dispatch.choose import Call, choose, only_torch_handles
from fastattn.dispatch.plans import Plans
from fastattn.errors import InputError
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.ops import operators as ops
from fastattn.run.layout import ALIGNMENT_BYTES, reason_to_copy

# The original of what patch_sdpa() replaces.
torch_sdpa = torch._C._nn.scaled_dot_product_attention

UNBOUNDED = -1


# query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table
_Tensors: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]
# max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale
_Options: TypeAlias = tuple[int, int, bool, Any, float, float, float | None]


class Plan(NamedTuple):
    """What one signature of arguments comes to: checked once, then kept."""

    call: Call
    scale: float
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    needs_grad: bool
    torch_sdpa_can: bool


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(mask(bias + softcap(scale * Q K^T))) V``, tiled (Dao, "FlashAttention-2", 2023).

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Sk, D]``; value: ``[B, Hkv, Sk, Dv]``; one floating dtype. Query head
            ``h`` reads KV head ``h // (Hq // Hkv)``.
        causal: query ``i``, at position ``i + Sk - Sq``, sees the keys up to its own position.
        window: ``(left, right)``: how many keys before and after its position a query sees; -1 is unbounded.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        bias: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``: added to the scores, or bool with True = attend. Differentiable.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: ``-slope * |position - key|`` is added (Press et al., "Train short, test
            long", 2022).
        sinks: ``[Hq]``: one more logit in every row's denominator, without a value. Differentiable.
        dropout_p: the probability with which dropout zeroes an attention weight; dropout_seed: an int or an int64
            tensor of one element on the device, by default drawn from torch's generator.
        scale: by default ``1 / sqrt(D)``.
        return_lse: also return the natural log of each row's softmax denominator, differentiable.
        deterministic: whether gradients have the same bits every time; by default what
            ``torch.use_deterministic_algorithms`` says.

    Returns:
        ``[B, Hq, Sq, Dv]``, and with ``return_lse`` the lse, ``[B, Hq, Sq]``, float32 (float64 for float64 inputs). A
        row that sees no key has output 0, lse -inf (or its sink) and gradient 0.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    return _attend(
        (query, key, value, bias, alibi_slopes, sinks, None, None, None),
        (0, 0, causal, window, softcap, dropout_p, scale),
        dropout_seed,
        deterministic,
        return_lse,
    )


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor | None = None,
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
    """``attention`` over sequences of different lengths, packed one after the other without padding.

    With a ``block_table`` the keys and values lie in the pages of a cache: prompts are taken in chunk by chunk, ragged,
    while every chunk attends to all that its sequence has in the cache (``PagedKVCache`` has an example).

    Args:
        query: ``[total_q, Hq, D]``; key: ``[total_k, Hkv, D]``; value: ``[total_k, Hkv, Dv]``. With a ``block_table``
            key and value are pages, ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``. They
            are never copied: on a GPU the last dim must be contiguous, and the base and the strides multiples of 16
            bytes.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]`` on the device: sequence ``b`` is the rows from ``cu_seqlens[b]``
            up to ``cu_seqlens[b + 1]``. They are not read back; where they are wrong, rows count as absent.
            ``FASTATTN_CHECK=1`` reads them and raises. Of keys in pages, ``cu_seqlens_k`` gives the number alone.
        max_seqlen_q, max_seqlen_k: the longest lengths; what a sequence has beyond them is absent.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence, in order; key ``j`` is row ``j % page_size``
            of page ``block_table[b, j // page_size]``. Where an entry names no page, its keys are absent. Gradients
            over pages are PyTorch's, through a copy of all that the table names.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``. The other options are those of ``attention``.

    Returns:
        ``[total_q, Hq, Dv]``, and with ``return_lse`` the lse, ``[Hq, total_q]``.

    Raises:
        InputError, TypeError: an argument that the host can see is wrong.
    """
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_tensor("block_table", block_table, optional=True)
    return _attend(
        (query, key, value, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table),
        (max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale),
        dropout_seed,
        deterministic,
        return_lse,
    )


def _attend(
    tensors: _Tensors,
    options: _Options,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    check_bool("return_lse", return_lse)
    if deterministic is not None:
        check_bool("deterministic", deterministic)
    cast = autocast_dtype(query.device.type)
    if cast is not None:
        query = autocast_to(cast, query)
        if block_table is None:  # pages are what they are
            key, value = autocast_to(cast, key), autocast_to(cast, value)
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:  # float32 goes with every query: it stays exact
            bias = autocast_to(cast, bias)
        tensors = (query, key, value, bias, *tensors[4:])

    plan = _plans.get(tensors, options)
    if cu_seqlens_q is not None and device_checks_are_on():
        assert cu_seqlens_k is not None
        _check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], options[0])
        _check_offsets("cu_seqlens_k", cu_seqlens_k, None if block_table is not None else key.shape[0], options[1])
        if block_table is not None:
            lengths, capacity = cu_seqlens_k.diff(), block_table.shape[1] * key.shape[2]
            longest = max(lengths.tolist(), default=0)
            expect(longest <= capacity, "block_table", f"room for the {longest} keys of a sequence", f"{capacity}")
            check_pages(block_table, lengths, key.shape[0], key.shape[2])
    seed = None
    if plan.dropout_p > 0 and dropout_seed is not None:
        seed = seed_tensor(dropout_seed, query.device)

    choice = choose(plan.call)
    if plan.dropout_p > 0 and seed is None:  # after the choice: explain must leave the generator alone
        seed = draw_seed(query.device)
    if choice.backend == "torch":
        if plan.torch_sdpa_can and not return_lse:
            grouped = "gqa" in plan.call.features
            result: Tensor = torch_sdpa(query, key, value, scale=plan.scale, enable_gqa=grouped)
            return result
        with without_autocast(query.device.type):
            out, lse = _reference(tensors, plan, seed, options[:2])
    else:
        if block_table is not None:
            for name, pages in (("key", key), ("value", value)):
                check_uncopied(name, pages, "pages are never copied")
        out, lse = ops.attention(
            choice.backend,
            query,
            key,
            value,
            bias,
            None if alibi_slopes is None else torch.atleast_2d(alibi_slopes.detach().float()),
            None if sinks is None else sinks.float(),
            seed,
            cu_seqlens_q,
            cu_seqlens_k,
            options[0],
            options[1],
            plan.scale,
            plan.window[0],
            plan.window[1],
            False,
            plan.softcap,
            plan.dropout_p,
            block_table,
            needs_grad=plan.needs_grad,
            deterministic=is_deterministic(deterministic),
            head_dims=choice.padded,
            decodes=choice.decodes,
        )
    return (out, lse) if return_lse else out


def _reference(
    tensors: _Tensors, plan: Plan, seed: Tensor | None, max_seqlens: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    options: dict[str, Any] = {
        "window": plan.window,
        "softcap": plan.softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": plan.dropout_p,
        "dropout_seed": seed,
        "scale": plan.scale,
    }
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return reference.attention(query, key, value, bias=bias, **options)
    return reference.attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, *max_seqlens, block_table=block_table, **options
    )


def _check_and_plan(tensors: _Tensors, options: _Options) -> Plan:
    query, key, value, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table = tensors
    max_seqlen_q, max_seqlen_k, causal, window, softcap, dropout_p, scale = options
    packed = cu_seqlens_q is not None
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
    if kv_heads == 0:
        expect(heads == 0, "key", f"at least one KV head for {heads} query heads", 0)
    else:
        expect(heads % kv_heads == 0, "query", f"a multiple of the {kv_heads} KV heads", f"{heads} heads")
    if packed:
        assert cu_seqlens_k is not None
        check_rank("cu_seqlens_q", cu_seqlens_q, "[B + 1]")
        batch = cu_seqlens_q.shape[0] - 1
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_dtype(name, offsets, (torch.int32,))
            check_same_device(name, offsets, query.device)
            expect(offsets.shape[0] >= 1, name, "at least one offset", 0)
            check_shape(name, offsets, (batch + 1,), "[B + 1]")
        check_int("max_seqlen_q", max_seqlen_q, minimum=0)
        check_int("max_seqlen_k", max_seqlen_k, minimum=0)
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
    check_bool("causal", causal)
    if causal:
        right = 0
        features.add("causal")
    if left >= 0 or right > 0 or (right == 0 and not causal):
        features.add("window")
    check_number("softcap", softcap, low=0.0)
    if softcap > 0:
        features.add("softcap")
    check_number("dropout_p", dropout_p, low=0.0, high=1.0)
    if dropout_p > 0:
        features.add("dropout")
    if scale is not None:
        check_number("scale", scale)
    if bias is not None:
        check_bias(bias, query, (batch, heads, query.shape[2], key.shape[2]))
        features.add("mask" if bias.dtype == torch.bool else "bias")
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, query.device, batch, heads)
        features.add("alibi")
    if sinks is not None:
        check_sinks(sinks, query.device, heads)
        features.add("sinks")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:6])
    if needs_grad:
        features.add("gradients")
        if bias is not None and bias.requires_grad:
            features.add("bias gradients")
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            features.add("slope gradients")
    if heads != kv_heads:
        features.add("gqa")
    if value.shape[-1] != head_dim:
        features.add("value dim")
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
    # torch's attention means the same where nothing is masked and every option is off; it also wants a key to look at.
    plain = not features - {"gqa", "value dim", "gradients"} and key.shape[-2] != 0
    return Plan(
        call,
        default_scale(head_dim) if scale is None else float(scale),
        (left, right),
        float(softcap),
        float(dropout_p),
        needs_grad,
        plain,
    )


_plans = Plans(_check_and_plan)


def default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


def check_window(window: Any) -> tuple[int, int]:
    """``(left, right)``, each at least -1."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InputError(f"window: expected (left, right), got {window!r}")
    for side in window:
        check_int("window", side, minimum=UNBOUNDED)
    return window[0], window[1]


def check_bias(bias: Any, query: Tensor, full: tuple[int, ...]) -> None:
    """Bool or floating ``[B or 1, Hq or 1, Sq or 1, Sk or 1]`` beside the query."""
    check_tensor("bias", bias, optional=True)
    check_rank("bias", bias, "[B or 1, Hq or 1, Sq or 1, Sk or 1]")
    check_same_device("bias", bias, query.device)
    check_dtype("bias", bias, (torch.bool, *dict.fromkeys((query.dtype, torch.float32))))
    fits = all(size in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
    expect(fits, "bias", f"each dimension 1 or that of [B, Hq, Sq, Sk] = {list(full)}", list(bias.shape))


def check_slopes(slopes: Any, device: torch.device, batch: int, heads: int) -> None:
    """Floating ``[Hq]`` or ``[B, Hq]``."""
    check_tensor("alibi_slopes", slopes, optional=True)
    check_same_device("alibi_slopes", slopes, device)
    check_dtype("alibi_slopes", slopes, FLOATING)
    fits = tuple(slopes.shape) in ((heads,), (batch, heads))
    expect(fits, "alibi_slopes", f"shape [Hq] = [{heads}] or [B, Hq] = [{batch}, {heads}]", list(slopes.shape))


def check_sinks(sinks: Any, device: torch.device, heads: int) -> None:
    """Floating ``[Hq]``."""
    check_tensor("sinks", sinks, optional=True)
    check_same_device("sinks", sinks, device)
    check_dtype("sinks", sinks, FLOATING)
    check_shape("sinks", sinks, (heads,), "[Hq]")


def check_uncopied(name: str, cache: Tensor, why: str) -> None:
    """Raises where a kernel cannot read a cache where it lies; ``why`` it is not copied then."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return  # such a tensor has no address
    reason = reason_to_copy(cache)
    if reason is not None:
        wanted = f"a contiguous last dimension, and base and strides that are multiples of {ALIGNMENT_BYTES} bytes"
        raise InputError(f"{name}: expected {wanted}, since {why}, got strides {cache.stride()}: {reason}")


def check_pages(block_table: Tensor, lengths: Tensor, num_pages: int, page_size: int) -> None:
    """Reads the pages of tokens back: only with ``FASTATTN_CHECK=1``."""
    first_token = torch.arange(block_table.shape[1], device=block_table.device) * page_size
    is_used = first_token < lengths[:, None]
    wrong = is_used & ((block_table < 0) | (block_table >= num_pages))
    if bool(wrong.any()):
        sequence, page = wrong.nonzero()[0].tolist()
        came = f"{int(block_table[sequence, page])} as page {page} of sequence {sequence}"
        expect(False, "block_table", f"pages from 0 to {num_pages - 1}", came)


def _check_offsets(name: str, offsets: Tensor, total: int | None, max_seqlen: int) -> None:
    """Reads the offsets back: only with ``FASTATTN_CHECK=1``. ``total``: of packed rows; None: of no tensor's."""
    values = offsets.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    expect(min(lengths, default=0) >= 0, name, "offsets that do not decrease", values)
    if total is not None:
        expect(values[0] == 0, name, "0 as the first offset", values[0])
        expect(values[-1] == total, name, f"{total} (the number of rows) as the last offset", values[-1])
    longest = max(lengths, default=0)
    expect(
        longest <= max_seqlen, name.replace("cu", "max").replace("seqlens", "seqlen"), f"at least {longest}", max_seqlen
    )


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """A dropout seed as an int64 tensor of one element on the device, without a synchronisation."""
    if isinstance(seed, Tensor):
        check_dtype("dropout_seed", seed, (torch.int64,))
        check_same_device("dropout_seed", seed, device)
        expect(seed.numel() == 1, "dropout_seed", "one element", list(seed.shape))
        return seed
    check_int("dropout_seed", seed)
    expect(-(2**63) <= seed < 2**64, "dropout_seed", "a 64-bit integer", seed)
    return torch.full((), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device=device)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of the device, so that ``torch.manual_seed`` and CUDA graphs govern it."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def is_deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
