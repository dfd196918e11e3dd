"""Runs calls of ``attention`` and ``attention_varlen`` with PyTorch's own attention, if that can compute the same
result.

``F.scaled_dot_product_attention`` needs no memory for the scores and is many times faster than ``reference``. This
module uses it for causal masks, windows, bool masks and additive biases, also for each sequence of a packed batch. The
module corrects three differences from our results:

- For a row that sees no key, some kernels of PyTorch return 0 and others NaN. Here such a row attends to all keys, and
  the module then sets its result to 0.
- A NaN in a masked key or value makes results NaN, because NaN times a probability of 0 is NaN. Here keys and values
  that are not finite are set to 0, and then the results of rows that see them are set to NaN.
- ``is_causal`` aligns to the top left, ``causal`` to the bottom right. If the two masks differ, the module passes a
  mask instead of ``is_causal``.

PyTorch's function does not compute what `attention` promises in the following calls. On a CPU, these calls go to
composite.py if it supports them. All other such calls go to the reference:

- ``return_lse``: PyTorch's function returns no lse;
- softcap, ALiBi slopes, sinks and pages (``block_table``): PyTorch's function does not have them;
- dropout: PyTorch draws another pattern;
- no keys at all: not every version of PyTorch supports that;
- a mask with a scale that is not positive: PyTorch's CPU kernel returns NaN;
- a bias of another dtype than the query's: PyTorch can round the bias to the query's dtype;
- a bias with gradients: if all scores of a row are ``finfo.min``, PyTorch's lse of the row loses the log of the number
  of keys, so gradients are wrong;
- a bias on a GPU: PyTorch's memory-efficient kernel multiplies scores by log2(e), which turns ``finfo.min`` into -inf;
- packed sequences on a GPU: the host does not read their lengths;
- ``deterministic=True`` on a GPU without ``torch.use_deterministic_algorithms``: PyTorch's function has no such
  argument;
- masks under ``torch.func``, and all calls under forward-mode differentiation: PyTorch's kernels have only first
  derivatives, in backward mode;
- masks over tensor subclasses that are not PyTorch's own: these can lack the operators for the corrections.

The module cannot recognise a call whose gradient is taken with ``create_graph=True``. For second derivatives, the user
must choose ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
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
    """Returns whether PyTorch's function can compute the call, judging only by dtypes, options and sizes."""
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
    """Computes attention with PyTorch's function and returns ``[B, Hq, Sq, Dv]``; a causal mask is part of
    ``window``."""
    is_grouped = False
    if query.shape[1] != key.shape[1]:  # `if` makes a bool: torch takes no SymBool
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
            nonfinite = (~(is_finite[0] & is_finite[1])).cumsum(2) > 0
            out = _nan_where(out, nonfinite.repeat_interleave(_group(query, key), dim=1))
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
        nonfinite = (~(is_finite[0] & is_finite[1])).repeat_interleave(_group(query, key), dim=1)
        seen = visible.expand(*visible.shape[:-1], num_keys).float() @ nonfinite.float()
        out = _nan_where(out, seen > 0)
    return out


def attend_packed(call: AttentionCall, attend_to: Callable[[AttentionCall], Tensor]) -> Tensor | None:
    """Returns ``[total_q, Hq, Dv]``, as ``attention_varlen`` does, or None if the host cannot read the offsets, or if
    no sequence has both queries and keys.

    The offsets must have been checked. ``attend_to`` attends over batches of equally long sequences.
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
    # Split all groups at once. If each group were a slice, the gradient of each slice would have the size of the whole
    # packed tensor.
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


def _nan_where(out: Tensor, sees_nonfinite: Tensor) -> Tensor:
    """Sets rows to NaN that see a key or value that is not finite. Multiplies, so that gradients become NaN too."""
    return out * torch.where(sees_nonfinite, math.nan, 1.0).to(out.dtype)


def _group(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1] if key.shape[1] else 1


def is_known_finite(*tensors: Tensor) -> bool:
    """Returns whether all elements are known to be finite, because their sum is.

    Returns False if the host cannot read the elements, or if a sum overflows. The sum runs over the last two dims
    first, because PyTorch sums these dims of 16-bit tensors ten times as fast as whole tensors.
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
