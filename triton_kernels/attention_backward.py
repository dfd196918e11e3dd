"""Attention backward: dQ, dK, dV, the bias's and the sinks' gradient, without atomics: the same inputs, the same bits.

    P  = exp(S - lse)             recomputed tile by tile, nothing of O(Sq * Sk) is stored
    dV = dropout(P)^T dO
    dP = dropout(dO V^T)
    dS = P (dP - delta),          delta = rowsum(dO * O) - dlse, once per row
    dQ = scale * dS K,  dK = scale * dS^T Q,  dbias = dS

One kernel computes delta; one, with a CTA per key tile, dK and dV over all query heads of its KV head; one, with a CTA per
query tile, dQ; and one, with a CTA per tile of the bias, the bias's gradient over what the bias is broadcast over.
Source: Dao, "FlashAttention-2", 2023, algorithm 2, split so that every sum has one owner and one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.device import facts
from fastattn.layout import empty_like_heads
from fastattn.triton_kernels.attention_common import (
    ADDITIVE_BIAS,
    INF,
    LN_2,
    LOG2_E,
    NO_BIAS,
    attention_scores,
    bias_argument,
    broadcast_strides,
    dropout_arguments,
    dropout_keep,
    is_finite,
    load_full_rows,
    load_rows,
    readable_all,
    row_strides,
    sequence_range,
    slope_argument,
    store_rows,
    strides_bhm,
    tile_range,
    window_arguments,
)
from fastattn.triton_kernels.tiles import BackwardKernel, attention_backward_tile, padded_head_dim
