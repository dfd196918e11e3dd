"""The host side that attention's launchers share: it turns the arguments of the op into those of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.layout import contiguous, readable
from fastattn.triton_kernels.attention_common import ADDITIVE_BIAS, BOOL_BIAS, NO_BIAS
from fastattn.triton_kernels.tiles import AttentionTile, padded_head_dim

Arguments = dict[str, Any]


def attention_constexprs(
    tile: AttentionTile,
    head_dim: int,
    value_dim: int,
    *,
    left: bool = False,
    right: bool = False,
    placed: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    bias: int = NO_BIAS.value,
    sinks: bool = False,
    dropout: bool = False,
) -> Arguments:
    """Returns the constexprs of every attention kernel, and the launch options."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "WIDTH_QK": padded_head_dim(head_dim),
        "WIDTH_V": padded_head_dim(value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "LEFT": left,
        "RIGHT": right,
        "PLACED": placed,
        "SOFTCAP": softcap,
        "ALIBI": alibi,
        "BIAS": bias,
        "SINKS": sinks,
        "DROPOUT": dropout,
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


class Scores(NamedTuple):
    """Holds the arguments that attention's operators share: what decides the scores, and which of them count.

    Shapes are those of `attention_forward`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    first_row: int | None
    first_key: int
    first_head: int
    softcap: float
    dropout_p: float
    block_table: Tensor | None = None

    def batch(self) -> int:
        """Returns the number of sequences."""
        return self.query.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    def longest(self) -> tuple[int, int]:
        """Returns the most queries and keys of a sequence, bounded by the tensors, so that no grid or window sum
        overflows."""
        if self.cu_seqlens_q is None:
            return self.query.shape[2], self.key.shape[2]
        num_keys = self.key.shape[0] if self.block_table is None else self.block_table.shape[1] * self.key.shape[2]
        return min(self.max_seqlen_q, self.query.shape[0]), min(self.max_seqlen_k, num_keys)

    def options(self) -> Arguments:
        """Returns the keyword arguments of `attention_constexprs`."""
        _, _, left, right = self._window()
        return {
            "left": left,
            "right": right,
            "placed": self.first_row is not None,
            "softcap": self.softcap > 0,
            "alibi": self.alibi_slopes is not None,
            "bias": bias_kind(self.bias),
            "sinks": self.sinks is not None,
            "dropout": self.dropout_p > 0,
        }

    def arguments(self) -> Arguments:
        """Returns the arguments that all attention kernels share."""
        query, key, value = readable(self.query), readable(self.key), readable(self.value)
        bias, slopes, packed = self.bias, self.alibi_slopes, self.cu_seqlens_q is not None
        max_seqlen_q, max_seqlen_k = self.longest()
        left, right, _, _ = self._window()
        threshold, factor = dropout_arguments(self.dropout_p)
        bias_b, bias_h, bias_m, bias_n = broadcast_strides(bias)
        return {
            "query": query,
            "key": key,
            "value": value,
            "bias": bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias,
            "alibi_slopes": contiguous(slopes),
            "sinks": contiguous(self.sinks),
            "dropout_seed": self.dropout_seed,
            "cu_seqlens_q": contiguous(self.cu_seqlens_q),
            "cu_seqlens_k": contiguous(self.cu_seqlens_k),
            **strides("q", query),
            **strides("k", key),
            **strides("v", value),
            "stride_bias_b": bias_b,
            "stride_bias_h": bias_h,
            "stride_bias_m": bias_m,
            "stride_bias_n": bias_n,
            "stride_slope_b": slopes.shape[1] if slopes is not None and slopes.shape[0] > 1 else 0,
            "num_heads": query.shape[1],
            "group_size": query.shape[1] // max(1, key.shape[1]),
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "total_q": query.shape[0] if packed else 0,
            "total_k": key.shape[0] if packed else 0,
            "scale": self.scale,
            "window_left": left,
            "window_right": right,
            "softcap": self.softcap,
            "dropout_threshold": threshold,
            "dropout_factor": factor,
            "query_offset": 0 if self.first_row is None else self.first_row - self.first_key,
            "dropout_row": self.first_row or 0,
            "dropout_key": self.first_key,
            "dropout_head": self.first_head,
        }

    def _window(self) -> tuple[int, int, bool, bool]:
        """Returns (left, right, LEFT, RIGHT). A side that reaches past every key is unbounded, so sums of positions fit
        into 32 bits."""
        max_seqlen_q, max_seqlen_k = self.longest()
        # The most that a row stands behind the first key, and before the last.
        behind = before = max_seqlen_q + max_seqlen_k
        if self.first_row is not None:  # row i stands at key i + offset
            offset = self.first_row - self.first_key
            behind, before = max_seqlen_q - 1 + offset, max_seqlen_k - 1 - offset
        left, right = 0 <= self.window_left < behind, 0 <= self.window_right < before
        return self.window_left if left else 0, self.window_right if right else 0, left, right


def is_crowded(options: Arguments) -> bool:
    """Returns whether the options need registers for every score, by which tiles.py chooses a tile."""
    crowded: bool = options["bias"] != NO_BIAS.value or options["dropout"] or options["alibi"] or options["softcap"]
    return crowded


def bias_kind(bias: Tensor | None) -> int:
    """Returns the constexpr BIAS for a bias."""
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


def broadcast_strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of a 4-D bias, 0 where its size is 1, so that every index reads the one element."""
    if tensor is None:
        return 0, 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def dropout_arguments(dropout_p: float) -> tuple[int, float]:
    """Returns (the threshold as the signed number with the same 32 bits, the factor of kept weights).

    With p = 1 the factor is 0, so nothing is kept.
    """
    threshold = min(int(dropout_p * 2**32), 2**32 - 1)
    signed = threshold - 2**32 if threshold >= 2**31 else threshold
    return signed, 1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0
