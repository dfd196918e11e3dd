"""``attention`` and ``attention_varlen`` through PyTorch's own attention, where that means what ours means.

``F.scaled_dot_product_attention`` needs no memory for the scores and is many times faster than ``reference``. Here it
gets every mask that it can express: causal, windows, bool masks and additive biases, in each sequence of a packed
batch. Three things it would do otherwise are put right around it:

- In a row without a key, one function of PyTorch returns 0, another NaN. It attends to all keys, and becomes 0 then.
- A NaN in a masked key or value spreads through the product with a probability of 0. What is not finite becomes 0, and
  the rows that see it become NaN then.
- ``is_causal`` counts from the top left, ours from the bottom right: where the two differ, a mask says it.

Other calls go to composite.py on a CPU, unless it lacks something too, else to the reference, since PyTorch's function
does not do what `attention` promises, for

- ``return_lse``: it returns none;
- softcap, ALiBi slopes, sinks and pages (``block_table``): it has none;
- dropout: its pattern is not ours;
- no keys at all: not every version of it takes that;
- a mask beside a scale that is not positive: its CPU kernel makes NaN of that;
- a bias of another dtype than the query's: it may be rounded to that dtype;
- a bias with gradients: beside scores of ``finfo.min`` the lse loses the number of keys, and with it the gradients;
- a bias on a GPU: its memory-efficient kernel multiplies scores by log2(e), which makes -inf of ``finfo.min``;
- packed sequences on a GPU: their lengths are not read back;
- ``deterministic=True`` on a GPU where ``torch.use_deterministic_algorithms`` does not say so: it has no such argument;
- masks under ``torch.func``, and all calls under forward-mode differentiation: its kernels have first derivatives only,
  backward;
- masks over other tensor subclasses than PyTorch's own: they may lack the operators that put things right.

Second derivatives by ``create_graph=True`` cannot be seen coming: they need
``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.checks import is_readable
from fastattn.dispatch.call import Call
from fastattn.dispatch.device import is_emulated

# The original of what patch_sdpa() replaces.
torch_sdpa = torch._C._nn.scaled_dot_product_attention

_MASKING = frozenset({"causal", "window", "mask", "bias", "varlen"})
_NOT_IN_TORCH = frozenset({"softcap", "alibi", "sinks", "dropout", "paged", "max logit"})


def can_express(call: Call, num_keys: int, scale: float, bias: Tensor | None) -> bool:
    """Whether PyTorch's function computes the call, from what every call of its signature has in common."""
    if call.features & _NOT_IN_TORCH or num_keys == 0:
        return False
    if not call.features & _MASKING:
        return True
    if scale <= 0 or call.only_torch is not None:
        return False
    if "bias" in call.features:
        is_exact = bias is not None and bias.dtype == call.dtype and call.device.type == "cpu"
        if not is_exact or "gradients" in call.features:
            return False
    return "varlen" not in call.features or call.device.type == "cpu"


def can_express_now(call: Call, deterministic: bool | None) -> bool:
    """The same from the state that PyTorch is in."""
    if forward_ad._current_level >= 0:
        return False
    is_unordered = "gradients" in call.features and call.device.type != "cpu"
    if is_unordered and deterministic and not torch.are_deterministic_algorithms_enabled():
        return False
    return not (call.features & _MASKING and torch._C._are_functorch_transforms_active())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    window: tuple[int, int],
    scale: float,
    is_grouped: bool,
) -> Tensor:
    """``[B, Hq, Sq, Dv]``, as ``attention``. ``window`` says what is causal, too; ``is_grouped``: fewer KV heads."""
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

    # [B or 1, Hq or 1, Sq or 1, Sk or 1] all
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


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    attend_to: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor | None:
    """``[total_q, Hq, Dv]``, as ``attention_varlen``; None where the host cannot see the offsets.

    Elsewhere they have been checked, and it reads them. ``attend_to`` attends over dense sequences: those of the same
    lengths go together.
    """
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
    pieces = []
    # All at once: the gradient of a slice for each sequence would be as long as all of them.
    for (length_q, length_k), *parts in zip(
        groups, _split(query, rows_q), _split(key, rows_k), _split(value, rows_k), strict=True
    ):
        q, k, v = (
            part.unflatten(0, (-1, length)).transpose(1, 2)
            for part, length in zip(parts, (length_q, length_k, length_k), strict=True)
        )
        pieces.append(attend_to(q, k, v).transpose(1, 2).flatten(0, 1))
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    return out.index_copy(0, torch.cat(rows_q), torch.cat(pieces))


def band(num_queries: int, num_keys: int, left: int, right: int, device: torch.device) -> Tensor | None:
    """What a window lets each query see, bool ``[1, 1, Sq, Sk]``; None: every key."""
    if left < 0 and right < 0:
        return None
    position = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    distance = torch.arange(num_keys, device=device) - position
    visible = distance >= -left if left >= 0 else distance <= right
    if left >= 0 and right >= 0:
        visible = visible & (distance <= right)
    return visible[None, None]


def _spoil(out: Tensor, sees_spoiled: Tensor) -> Tensor:
    """Multiplied, so that the NaN reaches the gradients too."""
    return out * torch.where(sees_spoiled, math.nan, 1.0).to(out.dtype)


def _group(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1] if key.shape[1] else 1


def is_known_finite(*tensors: Tensor) -> bool:
    """Whether all of them are finite, by their sums, which read them once; one that overflows leaves it unknown.

    PyTorch sums rows of 16-bit numbers ten times as fast as all of them at once.
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
