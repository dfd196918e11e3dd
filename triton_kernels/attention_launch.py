"""Prepares launches of attention: turns the arguments of the op into those of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.layout import contiguous, readable
from fastattn.triton_kernels.attention_common import ADDITIVE_BIAS, BOOL_BIAS, NO_BIAS
from fastattn.triton_kernels.tiles import AttentionTile, padded_head_dim

Arguments = dict[str, Any]


def attention_constexprs(tile: AttentionTile, head_dim: int, value_dim: int, **options: Any) -> Arguments:
    """Returns the constexprs of every attention kernel, and the launch options; ``options`` are `Scores.options`."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "WIDTH_QK": padded_head_dim(head_dim),
        "WIDTH_V": padded_head_dim(value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        **{name.upper(): value for name, value in options.items()},
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # the default of Triton up to 3.9; P = exp2(s * scale - max) is one FMA
    }


LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def arguments_of(kernel: Any, arguments: Arguments) -> Arguments:
    """Returns the ``arguments`` that ``kernel`` names, and the launch options."""
    return {name: arguments[name] for name in (*kernel.arg_names, *LAUNCH_OPTIONS)}


def launch(kernel: Any, num_programs: int, arguments: Arguments) -> None:
    """Runs ``num_programs`` CTAs of ``kernel`` with the ``arguments`` that it names."""
    if num_programs > 0:
        kernel[(num_programs,)](**arguments_of(kernel, arguments))


class Scores:
    """Turns the arguments of attention's operators (``given``, by name) into the arguments that the kernels share.

    Shapes are those of `attention_forward`.

    Attributes:
        batch: the number of sequences.
        longest: the most queries and the most keys of a sequence, bounded by the sizes of the tensors, so that no grid
            or window sum overflows.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        # ``attention_backward_add`` has neither bias nor sinks, and no backward operator a block table.
        names = ("bias", "sinks", "block_table", "key_ranges")
        self.bias, self.sinks, pages, self.ranges = (getattr(given, name, None) for name in names)
        query, key = given.query, given.key
        if given.cu_seqlens_q is None:
            self.batch, self.longest = query.shape[0], (query.shape[2], key.shape[2])
        else:
            num_keys = key.shape[0] if pages is None else pages.shape[1] * key.shape[2]
            self.batch = given.cu_seqlens_q.numel() - 1
            self.longest = min(given.max_seqlen_q, query.shape[0]), min(given.max_seqlen_k, num_keys)
        # A side of the window that reaches past every key counts as unbounded, so that sums of positions fit into 32
        # bits. ``behind`` bounds the distance from a row back to the first key, ``before`` that to the last key.
        behind = before = sum(self.longest)
        if given.first_row is not None:  # row i is at key position i + offset
            offset = given.first_row - given.first_key
            behind, before = self.longest[0] - 1 + offset, self.longest[1] - 1 - offset
        self._left, self._right = 0 <= given.window_left < behind, 0 <= given.window_right < before

    def options(self) -> Arguments:
        """Returns the values of the kernels' constexprs for the call's options, keyed by the constexprs' names in lower
        case."""
        given = self.given
        return {
            "left": self._left,
            "right": self._right,
            "ranges": 0 if self.ranges is None else self.ranges.shape[-2],
            "placed": given.first_row is not None,
            "softcap": given.softcap > 0,
            "alibi": given.alibi_slopes is not None,
            "bias": bias_kind(self.bias),
            "sinks": self.sinks is not None,
            "dropout": given.dropout_p > 0,
        }

    def arguments(self) -> Arguments:
        """Returns the arguments that all attention kernels share."""
        given, bias, slopes = self.given, self.bias, self.given.alibi_slopes
        query, key, value = readable(given.query), readable(given.key), readable(given.value)
        max_seqlen_q, max_seqlen_k = self.longest
        is_packed = given.cu_seqlens_q is not None
        threshold, factor = dropout_arguments(given.dropout_p)
        return {
            "query": query,
            "key": key,
            "value": value,
            "bias": bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias,
            "alibi_slopes": contiguous(slopes),
            "sinks": contiguous(self.sinks),
            "dropout_seed": given.dropout_seed,
            "cu_seqlens_q": contiguous(given.cu_seqlens_q),
            "cu_seqlens_k": contiguous(given.cu_seqlens_k),
            **strides("q", query),
            **strides("k", key),
            **strides("v", value),
            **broadcast_strides("bias", bias),
            "stride_slope_b": slopes.shape[1] if slopes is not None and slopes.shape[0] > 1 else 0,
            "num_heads": query.shape[1],
            "group_size": query.shape[1] // max(1, key.shape[1]),
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "total_q": query.shape[0] if is_packed else 0,
            "total_k": key.shape[0] if is_packed else 0,
            "scale": given.scale,
            "window_left": given.window_left if self._left else 0,
            "window_right": given.window_right if self._right else 0,
            "softcap": given.softcap,
            "dropout_threshold": threshold,
            "dropout_factor": factor,
            "query_offset": 0 if given.first_row is None else given.first_row - given.first_key,
            "dropout_row": given.first_row or 0,
            "dropout_key": given.first_key,
            "dropout_head": given.first_head,
            **self._range_arguments(),
        }

    def _range_arguments(self) -> Arguments:
        """Returns the arguments that say where the ranges of visible keys are."""
        ranges = contiguous(self.ranges)
        if ranges is None:
            return {"ranges": None, "stride_ranges_b": 0, "stride_ranges_h": 0}
        is_packed = self.given.cu_seqlens_q is not None
        batches, heads = (self.batch, ranges.shape[0]) if is_packed else ranges.shape[:2]
        return {
            "ranges": ranges,
            "num_range_batches": batches,
            "num_range_heads": heads,
            "stride_ranges_b": 0 if is_packed or batches == 1 else ranges.stride(0),
            "stride_ranges_h": 0 if heads == 1 else ranges.stride(-4),
        }


def is_crowded(options: Arguments) -> bool:
    """Returns whether the options need registers for every score, so that tiles.py chooses other tiles."""
    return options["bias"] != NO_BIAS.value or options["dropout"] or options["alibi"] or options["softcap"]


def bias_kind(bias: Tensor | None) -> int:
    """Returns the value of the constexpr BIAS for a bias."""
    if bias is None:
        return NO_BIAS.value
    return BOOL_BIAS.value if bias.dtype == torch.bool else ADDITIVE_BIAS.value


def strides(letter: str, tensor: Tensor) -> dict[str, int]:
    """Returns the batch, head and row stride (``…m``; ``…n`` for keys and values) of ``[B, H, S, D]`` or packed
    ``[total, H, D]``."""
    row = "n" if letter.endswith(("k", "v")) else "m"
    batch = 0 if tensor.dim() == 3 else tensor.stride(0)
    return {
        f"stride_{letter}b": batch,
        f"stride_{letter}h": tensor.stride(1),
        f"stride_{letter}{row}": tensor.stride(-3 if tensor.dim() == 3 else -2),
    }


def lse_strides(lse: Tensor) -> dict[str, int]:
    """Returns the batch and head strides of lse ``[B, H, S]``, or packed ``[H, total]``."""
    batch, head = (0, lse.stride(0)) if lse.dim() == 2 else lse.stride()[:2]
    return {"stride_lb": batch, "stride_lh": head}


def broadcast_strides(name: str, bias: Tensor | None) -> dict[str, int]:
    """Returns the strides of a 4-D bias, 0 where its size is 1, so that every index reads the one element."""
    found = [0] * 4
    if bias is not None:
        found = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return {f"stride_{name}_{dim}": stride for dim, stride in zip("bhmn", found, strict=True)}


def dropout_arguments(dropout_p: float) -> tuple[int, float]:
    """Returns the threshold, as the int32 with the bits of the uint32, and the factor of the kept probabilities.

    With p = 1 the factor is 0, because no threshold drops the largest word too.
    """
    threshold = min(int(dropout_p * 2**32), 2**32 - 1)
    signed = threshold - 2**32 if threshold >= 2**31 else threshold
    return signed, 1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0
