"""Runs ``attention`` and ``attention_varlen`` by PyTorch's own attention, where that can compute the same.

``F.scaled_dot_product_attention`` needs no memory for the scores and is many times faster than ``reference``. Here it
computes causal masks, windows, bool masks and additive biases, also for each sequence of a packed batch. Three
differences from our results are corrected around it:

- For a row that sees no key, one kernel of PyTorch returns 0, another NaN. Here such a row attends to all keys, and its
  result is then set to 0.
- A NaN in a masked key or value spreads through the product with a probability of 0. Here values that are not finite
  are set to 0, and the rows that see them are then set to NaN.
- ``is_causal`` counts from the top left, ours from the bottom right. Where the two differ, a mask is passed instead.

PyTorch's function does not do what `attention` promises in the following calls. They go to composite.py on a CPU if it
can compute them, else to the reference:

- ``return_lse``: it returns no lse;
- softcap, ALiBi slopes, sinks and pages (``block_table``): it does not have them;
- dropout: its pattern is not ours;
- no keys at all: not every version of it takes that;
- a mask with a scale that is not positive: its CPU kernel returns NaN;
- a bias of another dtype than the query's: it may be rounded to that dtype;
- a bias with gradients: in a row of ``finfo.min`` scores the lse loses the log of their number, so gradients are wrong;
- a bias on a GPU: its memory-efficient kernel multiplies scores by log2(e), which turns ``finfo.min`` into -inf;
- packed sequences on a GPU: their lengths are not read back;
- ``deterministic=True`` on a GPU without ``torch.use_deterministic_algorithms``: it has no such argument;
- masks under ``torch.func``, and all calls under forward-mode differentiation: its kernels have only first derivatives,
  in backward mode;
- masks over tensor subclasses that are not PyTorch's own: they may lack the operators for the corrections.

A call with ``create_graph=True`` for second derivatives cannot be recognised: it needs
``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.call import AttentionCall
from fastattn.checks import is_readable
from fastattn.dispatch.device import is_emulated
from fastattn.dispatch.request import Request

# The original function that patch_sdpa() replaces.
torch_sdpa = torch._C._nn.scaled_dot_product_attention

_MASKING = frozenset({"causal", "window", "mask", "bias", "varlen"})
IN_TORCH = _MASKING | {"gradients", "bias gradients", "gqa", "value dim"}


def can_express(request: Request, num_keys: int, scale: float, bias: Tensor | None) -> bool:
    """Returns whether PyTorch's function can compute the call, judging by its signature alone."""
    if not request.features <= IN_TORCH or num_keys == 0:
        return False
    if not request.features & _MASKING:
        return True
    if scale <= 0 or request.only_torch is not None:
        return False
    if "bias" in request.features:
        is_exact = bias is not None and bias.dtype == request.dtype and request.device.type == "cpu"
        if not is_exact or "gradients" in request.features:
            return False
    return "varlen" not in request.features or request.device.type == "cpu"


def can_express_now(request: Request, deterministic: bool | None) -> bool:
    """Returns whether PyTorch's state (forward-mode AD, torch.func, determinism) lets its function compute the call."""
    if forward_ad._current_level >= 0:
        return False
    is_unordered = "gradients" in request.features and request.device.type != "cpu"
    if is_unordered and deterministic and not torch.are_deterministic_algorithms_enabled():
        return False
    return not (request.features & _MASKING and torch._C._are_functorch_transforms_active())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    """Computes attention by PyTorch's function and returns ``[B, Hq, Sq, Dv]``; a causal mask is part of ``window``."""
    is_grouped = False
    if query.shape[1] != key.shape[1]:  # an `if`: the comparison may be a SymBool, which torch does not take
        is_grouped = True
    num_queries, num_keys = query.shape[2], key.shape[2]
    left, right = window
    sees_all_before = left < 0
    if bias is None and sees_all_before and (right < 0 or right >= num_queries - 1):
        return torch_sdpa(query, key, value, scale=scale, enable_gqa=is_grouped)

    is_finite = None if is_known_finite(key, value) else (key.isfinite().all(-1, keepdim=True), value.isfinite())
    if is_finite is not None:
        key, value = key.masked_fill(~is_finite[0], 0.0), value.masked_fill(~is_finite[1], 0.0)
    if bias is None and sees_all_before and right == 0 and num_queries == num_keys:
        out = torch_sdpa(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
        if is_finite is not None:
            spoiled = (~(is_finite[0] & is_finite[1])).cumsum(2) > 0
            out = _spoil(out, spoiled.repeat_interleave(_group(query, key), dim=1))
        return out

    # All masks below are [B or 1, Hq or 1, Sq or 1, Sk or 1].
    in_window = band(num_queries, num_keys, left, right, query.device)
    visible = None if bias is None else bias if bias.dtype == torch.bool else bias != -math.inf
    visible = in_window if visible is None else visible if in_window is None else visible & in_window
    assert visible is not None
    sees_nothing = ~visible.any(-1, keepdim=True)
    if bias is None or bias.dtype == torch.bool:
        mask = visible | sees_nothing
    else:
        mask = bias.masked_fill(~visible, -math.inf).masked_fill(sees_nothing, 0.0)
    out = torch_sdpa(query, key, value, mask, scale=scale, enable_gqa=is_grouped)
    out = out.masked_fill(sees_nothing, 0.0)
    if is_finite is not None:
        spoiled = (~(is_finite[0] & is_finite[1])).repeat_interleave(_group(query, key), dim=1)
        seen = visible.expand(*visible.shape[:-1], num_keys).float() @ spoiled.float()
        out = _spoil(out, seen > 0)
    return out


def attend_packed(call: AttentionCall, attend_to: Callable[[AttentionCall], Tensor]) -> Tensor | None:
    """Returns ``[total_q, Hq, Dv]``, as ``attention_varlen`` does, or None where the host cannot see the offsets or no
    sequence has both queries and keys.

    It reads the offsets, which have been checked. ``attend_to`` attends over batches of equally long sequences.
    """
    query, key, value, cu_seqlens_q, cu_seqlens_k = *call[:3], call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    if is_emulated() or not is_readable(query, key, value, cu_seqlens_q, cu_seqlens_k):
        return None
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    lengths = zip(_lengths(starts_q), _lengths(starts_k), strict=True)
    for sequence, (length_q, length_k) in enumerate(lengths):
        if length_q and length_k:
            groups.setdefault((length_q, length_k), []).append(sequence)
    if not groups:
        return None
    rows_q = [_rows(starts_q, sequences, length) for (length, _), sequences in groups.items()]
    rows_k = [_rows(starts_k, sequences, length) for (_, length), sequences in groups.items()]
    outs = []
    # Split all groups at once: if each were a slice, each gradient would be as long as the whole packed tensor.
    for (length_q, length_k), *parts in zip(
        groups, _split(query, rows_q), _split(key, rows_k), _split(value, rows_k), strict=True
    ):
        q, k, v = (
            part.unflatten(0, (-1, length)).transpose(1, 2)
            for part, length in zip(parts, (length_q, length_k, length_k), strict=True)
        )
        outs.append(attend_to(call.with_tensors((q, k, v, None))).transpose(1, 2).flatten(0, 1))
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    return out.index_copy(0, torch.cat(rows_q), torch.cat(outs))


def band(num_queries: int, num_keys: int, left: int, right: int, device: torch.device) -> Tensor | None:
    """Returns which keys a window lets each query see, bool ``[1, 1, Sq, Sk]``, or None if it hides no key."""
    if left < 0 and right < 0:
        return None
    position = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    distance = torch.arange(num_keys, device=device) - position
    visible = distance >= -left if left >= 0 else distance <= right
    if left >= 0 and right >= 0:
        visible = visible & (distance <= right)
    return visible[None, None]


def _spoil(out: Tensor, sees_spoiled: Tensor) -> Tensor:
    """Makes rows that see a spoiled key NaN, by a product, so that the NaN reaches the gradients too."""
    return out * torch.where(sees_spoiled, math.nan, 1.0).to(out.dtype)


def _group(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1] if key.shape[1] else 1


def is_known_finite(*tensors: Tensor) -> bool:
    """Returns whether all elements are known to be finite, because their sum is.

    Returns False if the host may not read them, or if a sum overflows. PyTorch sums the last two dims of 16-bit tensors
    ten times as fast as whole tensors.
    """
    if not is_readable(*tensors):
        return False
    for tensor in tensors:
        sums = tensor.detach().sum((-2, -1))
        wide = torch.promote_types(tensor.dtype, torch.float32)
        if not (math.isfinite(sums.sum(dtype=wide).item()) or math.isfinite(tensor.detach().sum(dtype=wide).item())):
            return False
    return True


def _lengths(offsets: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(offsets)]


def _rows(starts: list[int], sequences: list[int], length: int) -> Tensor:
    begin = torch.tensor([starts[sequence] for sequence in sequences], device="cpu")
    return (begin[:, None] + torch.arange(length, device="cpu")).flatten()


def _split(packed: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
    return packed.index_select(0, torch.cat(rows)).split([len(part) for part in rows])
