"""Appends new keys and values to a KV cache, with RoPE on the keys, and quantises them if the cache is int8 or fp8.

    k_cache[:, len + j] = quantise(rotate(k_new[:, j], position = len + j))         j = 0 … S_new - 1
    v_cache[:, len + j] = quantise(v_new[:, j])

One program writes BLOCK_T tokens of one KV head of one sequence, keys then values. A second kernel serves callers that
name a slot for each token themselves, and have rotated the keys:

    k_cache[slot // page_size, :, slot % page_size] = quantise(k_new[i])            slot = slot_mapping[i]

Quantisation is symmetric with one fp32 scale per token and head: scale = max|x| / 127 (1 for a row of zeros),
x = round-to-nearest-even(x / scale). For fp8, 448 replaces 127, or the caller gives the scales. Tokens that do not fit
into the capacity, or whose page or slot does not exist, are dropped. The launchers disable fused multiply-adds,
so that the cache gets the same bits as from ``fastattn.reference``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.layout import readable
from fastattn.quantization import FP8, are_given

from .decode_cache import (
    NOT_SPECIALIZED,
    cache_arguments,
    cache_constexprs,
    load_rotated,
    locate_tokens,
    rotary_arguments,
    table_arguments,
    tokens_before,
)
from .fp8 import encode_fp8
from .tiles import ceil_div

# Adding and subtracting 1.5 * 2^23 rounds an fp32 of magnitude below 2^22 to the nearest integer, ties to even.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)

# The tokens of one program. Decoding appends one or a few; a prompt's thousands still make enough programs.
BLOCK_T = 16


@triton.jit
def store_tokens(
    x,  # [BLOCK_T, D_PAD] fp16 or bf16
    cache, cache_strides, scales, scale_strides, block, kv_head_idx, slot, is_stored, dim,
    HEAD_DIM: tl.constexpr, QUANTISED: tl.constexpr, IS_FP8: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Writes rows ``x`` to the cache, quantised if the cache is int8 or fp8. If ``GIVEN``, the caller gives the scales:
    one per KV head, one for all heads, or None, which means 1."""
    if GIVEN:
        x = x.to(tl.float32)
        if scales is not None:
            x = tl.div_rn(x, tl.load(scales + kv_head_idx * scale_strides[1]) + tl.zeros(x.shape, tl.float32))
        x = encode_fp8(x)
    elif QUANTISED:
        x = x.to(tl.float32)
        LARGEST: tl.constexpr = 448.0 if IS_FP8 else 127.0
        absmax = tl.max(tl.abs(x), axis=1)
        scale = tl.where(absmax == 0.0, 1.0, tl.div_rn(absmax, LARGEST))
        # The maximum ignores NaN. Zero times a non-finite value is NaN, so a row with such a value gets the scale NaN
        # and reads as NaN.
        scale += tl.sum(x * 0.0, axis=1)
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        ratio = tl.where(scale[:, None] == scale[:, None], ratio, 0.0)
        if IS_FP8:
            x = encode_fp8(ratio)
        else:
            x = tl.minimum(tl.maximum(ratio + ROUND_TO_INTEGER - ROUND_TO_INTEGER, -127.0), 127.0).to(tl.int8)
        scale_offset = block * scale_strides[0] + kv_head_idx * scale_strides[1] + slot * scale_strides[2]
        tl.store(scales + scale_offset, scale, mask=is_stored)
    row_offset = block * cache_strides[0] + kv_head_idx * cache_strides[1] + slot * cache_strides[2]
    row_offset = tl.multiple_of(row_offset, 128 // cache.dtype.element_ty.primitive_bitwidth)  # 16 bytes
    tl.store(cache + row_offset[:, None] + dim[None, :], x, mask=is_stored[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def append_kernel(
    k_new, k_new_strides, v_new, v_new_strides,  # [B, Hkv, S_new, D or Dv]
    k_cache, k_strides, v_cache, v_strides,  # [blocks, Hkv, rows, D or Dv]
    k_scale, k_scale_strides, v_scale, v_scale_strides,  # [blocks, Hkv, rows] fp32, or None
    cache_seqlens,  # [B] int32
    block_table, table_stride, page_stride, num_pages,  # [B, max_pages] int32, or None
    rotary_cos, rotary_sin, rotary_stride, num_positions,  # [num_positions, ROTARY_DIM / 2], or None
    capacity, num_new, num_kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, QUANTISED: tl.constexpr,
    IS_FP8: tl.constexpr, K_GIVEN: tl.constexpr, V_GIVEN: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    num_t_blocks = tl.cdiv(num_new, BLOCK_T)
    pid = tl.program_id(0)
    t_block = pid % num_t_blocks
    kv_head_idx = (pid // num_t_blocks % num_kv_heads).to(tl.int64)
    batch_idx = (pid // (num_t_blocks * num_kv_heads)).to(tl.int64)

    # Where the new tokens go.
    token = t_block * BLOCK_T + tl.arange(0, BLOCK_T)
    position = tokens_before(cache_seqlens, batch_idx, capacity) + token
    fits = (token < num_new) & (position < capacity)
    block, slot, is_stored = locate_tokens(
        position, fits, block_table, table_stride, page_stride, num_pages, batch_idx, PAGE_SIZE, SAME_PAGE=False
    )

    dim = tl.arange(0, D_PAD)
    k_rows = k_new + batch_idx * k_new_strides[0] + kv_head_idx * k_new_strides[1]
    k_rows += token.to(tl.int64) * k_new_strides[2]
    k = load_rotated(
        k_rows, is_stored, position, rotary_cos, rotary_sin, rotary_stride, num_positions, dim,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip
    store_tokens(
        k, k_cache, k_strides, k_scale, k_scale_strides, block, kv_head_idx, slot, is_stored, dim, HEAD_DIM, QUANTISED,
        IS_FP8, K_GIVEN,
    )  # fmt: skip

    dim = tl.arange(0, DV_PAD)
    v_rows = v_new + batch_idx * v_new_strides[0] + kv_head_idx * v_new_strides[1]
    v_rows += token.to(tl.int64) * v_new_strides[2]
    v_rows = tl.multiple_of(v_rows, 16)  # bytes
    v = tl.load(v_rows[:, None] + dim[None, :], mask=is_stored[:, None] & (dim < VALUE_DIM)[None, :], other=0.0)
    store_tokens(
        v, v_cache, v_strides, v_scale, v_scale_strides, block, kv_head_idx, slot, is_stored, dim, VALUE_DIM, QUANTISED,
        IS_FP8, V_GIVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def append_to_slots_kernel(
    k_new, k_new_strides, v_new, v_new_strides,  # [tokens, Hkv, D or Dv]
    k_cache, k_strides, v_cache, v_strides,  # [num_pages, Hkv, PAGE_SIZE, D or Dv]
    k_scale, k_scale_strides, v_scale, v_scale_strides,  # [num_pages, Hkv, PAGE_SIZE] fp32, or None
    slot_mapping, slot_stride,  # [tokens] int64 or int32
    num_tokens, num_slots, num_kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, QUANTISED: tl.constexpr, IS_FP8: tl.constexpr, K_GIVEN: tl.constexpr,
    V_GIVEN: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    kv_head_idx = (pid % num_kv_heads).to(tl.int64)
    token = (pid // num_kv_heads).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)

    # Where the tokens go; slot_mapping may hold any number.
    slot = tl.load(slot_mapping + token * slot_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_slots)
    page, row = slot // PAGE_SIZE, slot % PAGE_SIZE

    dim = tl.arange(0, D_PAD)
    k_rows = tl.multiple_of(k_new + token * k_new_strides[0] + kv_head_idx * k_new_strides[1], 16)  # bytes
    k = tl.load(k_rows[:, None] + dim[None, :], mask=is_stored[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    store_tokens(
        k, k_cache, k_strides, k_scale, k_scale_strides, page, kv_head_idx, row, is_stored, dim, HEAD_DIM, QUANTISED,
        IS_FP8, K_GIVEN,
    )  # fmt: skip

    dim = tl.arange(0, DV_PAD)
    v_rows = tl.multiple_of(v_new + token * v_new_strides[0] + kv_head_idx * v_new_strides[1], 16)  # bytes
    v = tl.load(v_rows[:, None] + dim[None, :], mask=is_stored[:, None] & (dim < VALUE_DIM)[None, :], other=0.0)
    store_tokens(
        v, v_cache, v_strides, v_scale, v_scale_strides, page, kv_head_idx, row, is_stored, dim, VALUE_DIM, QUANTISED,
        IS_FP8, V_GIVEN,
    )  # fmt: skip


def append_to_cache(given: Any) -> None:
    """Writes token ``i`` to slot ``slot_mapping[i]`` of the caches, in place, as ``fastattn.append_to_cache`` does;
    ``given`` holds the op's arguments by name, which the caller has checked."""
    k_new, v_new = readable(given.k_new), readable(given.v_new)
    tokens, kv_heads, _ = k_new.shape
    num_pages, _, page_size, _ = given.k_cache.shape
    grid = (kv_heads * ceil_div(tokens, BLOCK_T),)
    if grid[0] == 0 or num_pages * page_size == 0:
        return
    append_to_slots_kernel[grid](
        k_new, k_new.stride()[:2], v_new, v_new.stride()[:2], *cache_arguments(given),
        given.slot_mapping, given.slot_mapping.stride(0), tokens, num_pages * page_size, kv_heads,
        PAGE_SIZE=page_size, **_append_constexprs(given),
    )  # fmt: skip


def _append_constexprs(given: Any) -> dict[str, Any]:
    """Returns the constexprs that both append kernels have, and the launch options."""
    is_fp8 = given.k_cache.dtype == FP8
    return {
        **cache_constexprs(given),
        "QUANTISED": given.k_cache.dtype in FEATURE_OF_CACHE,
        "K_GIVEN": is_fp8 and are_given(given.k_scale),
        "V_GIVEN": is_fp8 and are_given(given.v_scale),
        "BLOCK_T": BLOCK_T,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def launch_append(given: Any, cache_seqlens: Tensor, capacity: int) -> None:
    """Writes ``k_new [B, Hkv, S_new, D]`` and ``v_new [B, Hkv, S_new, Dv]`` into the caches, in place.

    ``given`` holds the arguments of ``attention_decode`` by name; ``cache_seqlens`` is contiguous.
    """
    k_new, v_new = readable(given.k_new), readable(given.v_new)
    batch, kv_heads, num_new, _ = k_new.shape
    grid = (batch * kv_heads * ceil_div(num_new, BLOCK_T),)
    if grid[0] == 0 or capacity == 0:
        return
    append_kernel[grid](
        k_new, k_new.stride()[:3], v_new, v_new.stride()[:3], *cache_arguments(given),
        cache_seqlens, *table_arguments(given), *rotary_arguments(given), capacity, num_new, kv_heads,
        ROTARY_DIM=0 if given.rotary_cos is None else 2 * given.rotary_cos.shape[1],
        INTERLEAVED=given.rotary_interleaved,
        PAGE_SIZE=0 if given.block_table is None else given.k_cache.shape[2],
        **_append_constexprs(given),
    )  # fmt: skip
