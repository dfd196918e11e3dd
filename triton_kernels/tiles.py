"""Tile sizes and split counts of the Triton kernels: pure functions, importable without Triton.

Each number carries its reason. "AOT" means that it was checked on the machine code that Triton generates (registers,
spills, shared memory: ``tests/test_triton_compile.py``); "prediction" means that nobody has timed it on a GPU yet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

# What one block may use of an SM's shared memory, by compute capability (CUDA programming guide, table of technical
# specifications): 227 KB on sm_90 and sm_100, 163 KB on sm_80 and sm_87, 99 KB on sm_86, sm_89 and sm_120.
_LARGE_SHARED_MEMORY = 227 * 1024
_A100_SHARED_MEMORY = 163 * 1024
_SMALL_SHARED_MEMORY = 99 * 1024


def shared_memory_limit(arch: int) -> int:
    """Bytes of shared memory that one block may use on compute capability ``arch`` (80, 89, 90, ...)."""
    if arch in (80, 87):
        return _A100_SHARED_MEMORY
    if 90 <= arch < 120:
        return _LARGE_SHARED_MEMORY
    return _SMALL_SHARED_MEMORY


def padded_head_dim(head_dim: int) -> int:
    """``head_dim`` rounded up to a power of two, which is the only width that a Triton tile can have."""
    return max(16, 1 << (head_dim - 1).bit_length())


# ---------------------------------------------------------------------------------------------------------------------
# Attention forward and backward
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionTile:
    """One CTA works on ``block_m`` query rows and ``block_n`` key rows at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


BackwardKernel = Literal["key_value", "query", "bias"]


def attention_forward_tile(
    arch: int, head_dim: int, value_dim: int, masked: bool = False, crowded: bool = False
) -> AttentionTile:
    """Tile of the attention forward kernel; ``masked``: causal or window, ``crowded``: bias, ALiBi, softcap or dropout."""
    width = max(padded_head_dim(head_dim), padded_head_dim(value_dim))
    if width <= 64:
        return AttentionTile(128, 64, num_warps=4, num_stages=3)
    if width <= 128:
        return AttentionTile(128, 64, num_warps=8, num_stages=2)
    return AttentionTile(64, 32, num_warps=8, num_stages=2)


def attention_backward_tile(
    arch: int, head_dim: int, value_dim: int, kernel: BackwardKernel, masked: bool = False, crowded: bool = False
) -> AttentionTile:
    """Tile of one of the backward kernels: "key_value" (dK, dV), "query" (dQ) or "bias" (the bias's gradient)."""
    width = max(padded_head_dim(head_dim), padded_head_dim(value_dim))
    if width <= 64:
        return AttentionTile(64, 64, num_warps=4, num_stages=2)
    if width <= 128:
        return AttentionTile(64, 64, num_warps=8, num_stages=2)
    return AttentionTile(32, 32, num_warps=8, num_stages=1)


# ---------------------------------------------------------------------------------------------------------------------
# Flash-decoding
# ---------------------------------------------------------------------------------------------------------------------

# Bounds the fp32 partial results (num_splits times the output) and the combine kernel's loop. 256 splits fill the
# 2 x 132 CTA slots of an H200 from a single KV head.
DECODE_MAX_SPLITS = 256

# A split of a batch-invariant plan always has this many keys, whatever else is in the batch. 1024 keys of 128 + 128
# 16-bit dims are 512 KB of cache, against which the partial result of 16 rows, written and read (16 KB), is 3 %.
DECODE_INVARIANT_SPLIT_KEYS = 1024

# The cost model of `decode_num_splits`, in units of the time in which one CTA walks over one block of keys. Estimated
# from latencies (a block is one DRAM round trip spread over the stages in flight, about 0.4 us), not measured.
DECODE_SETUP_BLOCKS = 2.0  # launch, query, RoPE, first loads, epilogue: about 1 us
DECODE_COMBINE_BLOCKS = 6.0  # the second kernel launch, and its first loads: 2 to 3 us
DECODE_COMBINE_BLOCKS_PER_SPLIT = 1 / 16  # combine reads 16 partial results per round trip


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class DecodeTile:
    """Constexprs of `decode.split_kernel`: rows (query heads of one KV head times queries) and keys of one tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int


def decode_tile(
    arch: int,
    head_dim: int,
    value_dim: int,
    rows: int,
    cache_itemsize: int,
    shared_memory_bytes: int,
    page_size: int = 0,
) -> DecodeTile:
    """The tile of `decode.split_kernel` for ``rows`` = Sq * Hq / Hkv packed query rows.

    It must not depend on the batch: a row's bits would (batch_invariant). ``cache_itemsize`` is the bytes of one cache
    element (1 for int8), ``shared_memory_bytes`` what one CTA may use, ``page_size`` 0 for a contiguous cache.
    """
    key_width, value_width = padded_head_dim(head_dim), padded_head_dim(value_dim)
    width = key_width + value_width
    # 16 is the least that an MMA takes. 64 rows of 256 + 256 dims spill registers even with eight warps (AOT, sm_90).
    block_m = min(64 if width <= 256 else 32, max(16, 1 << (rows - 1).bit_length()))
    # Four warps until the accumulator, and RoPE on the whole query tile before the loop, spill (AOT: 32 rows of 128 + 128).
    num_warps = 8 if block_m * width >= 32 * 256 else 4
    # 64 keys of 128 + 128 16-bit dims are 32 KB, a good unit to keep in flight; wider heads take half as many keys.
    block_n = 64 if width <= 256 else 32

    # Shared memory outside the pipeline (AOT): the query tile and the probabilities, 16-bit. wgmma, which 64 rows get on
    # sm_90, also wants there what else it multiplies: keys and values made from int8, or where values are not finite.
    is_wgmma = arch == 90 and block_m == 64
    fixed_bytes = 2 * (block_m * key_width + block_m * block_n + (block_n * width if is_wgmma else 0))
    block_bytes = block_n * width * cache_itemsize
    # Two CTAs on an SM hide each other's softmax and edges, if each has two blocks in flight. Bandwidth needs some 32 KB
    # per SM (4.8 TB/s times 0.8 us over 132 SMs); more than three blocks only lengthen the start.
    for ctas_per_sm in (2, 1):
        buffers = min(3, (shared_memory_bytes // ctas_per_sm - fixed_bytes) // block_bytes)
        if buffers >= 2:
            break
    # Triton's pipeliner gives num_stages - 1 buffers to an mma.sync loop, num_stages to wgmma, and half of that where
    # the addresses come from a gather of page ids, which is pipelined as well (AOT).
    gathers = page_size % block_n != 0
    num_stages = buffers * (2 if gathers else 1) + (0 if is_wgmma else 1)
    return DecodeTile(block_m, block_n, num_warps, max(1, num_stages), ctas_per_sm)


def decode_key_blocks(capacity: int, num_queries: int, window_left: int, block_n: int) -> int:
    """The most blocks of ``block_n`` keys that the queries of one sequence can see together (``window_left`` < 0: unbounded)."""
    num_blocks = ceil_div(capacity, block_n)
    if window_left < 0:
        return num_blocks
    # The queries are the last num_queries positions, so that nothing is right of them, and they see window_left keys
    # more on the left. That many keys touch one block more than they fill, when they begin in the middle of one.
    return min(num_blocks, ceil_div(window_left + num_queries - 1, block_n) + 1)


def decode_num_splits(
    batch: int, kv_heads: int, m_blocks: int, key_blocks: int, num_sms: int, ctas_per_sm: int = 2
) -> int:
    """Into how many parts each sequence of up to ``key_blocks`` blocks of keys is split, so that the grid fills the GPU.

    The estimated time of ``s`` splits is that of the waves of CTAs plus that of merging:
        ceil(batch * kv_heads * m_blocks * s / slots) * (setup + ceil(key_blocks / s)) + (combine(s) if s > 1)
    and the least of it wins, the smaller ``s`` in a tie. Many sequences or heads: 1, because more splits only add waves.
    One sequence: as many as there are slots. Few blocks: 1, because the merge costs more than it saves. Unlike a
    threshold on the fill of the SMs, a sum of costs has no cliff between neighbouring sizes. The host knows only the
    capacity: a shorter sequence has fewer keys in each of its splits, not fewer splits.
    """
    tiles = batch * kv_heads * m_blocks
    slots = max(1, num_sms * ctas_per_sm)

    def cost(splits: int) -> float:
        waves = ceil_div(tiles * splits, slots)
        merge = DECODE_COMBINE_BLOCKS + splits * DECODE_COMBINE_BLOCKS_PER_SPLIT if splits > 1 else 0.0
        return waves * (DECODE_SETUP_BLOCKS + ceil_div(key_blocks, splits)) + merge

    return min(range(1, max(1, min(key_blocks, DECODE_MAX_SPLITS)) + 1), key=cost)


@dataclass(frozen=True)
class DecodePlan:
    """How a sequence's key blocks are dealt to the splits: ``blocks_per_split`` each, or evenly if that is 0."""

    num_splits: int
    blocks_per_split: int


@functools.lru_cache(maxsize=4096)
def decode_plan(
    batch: int,
    kv_heads: int,
    m_blocks: int,
    key_blocks: int,
    num_sms: int,
    tile: DecodeTile,
    requested_splits: int = 0,
    batch_invariant: bool = False,
) -> DecodePlan:
    """``requested_splits`` > 0 is honoured, up to ``key_blocks`` (see `decode_key_blocks`).

    With ``batch_invariant``, splits are `DECODE_INVARIANT_SPLIT_KEYS` long (longer where `DECODE_MAX_SPLITS` of them do
    not hold ``key_blocks``), so that where a sequence is cut depends on that sequence alone.
    """
    if requested_splits > 0:
        return DecodePlan(max(1, min(requested_splits, key_blocks)), 0)
    if batch_invariant:
        blocks_per_split = max(DECODE_INVARIANT_SPLIT_KEYS // tile.block_n, ceil_div(key_blocks, DECODE_MAX_SPLITS))
        return DecodePlan(max(1, ceil_div(key_blocks, blocks_per_split)), blocks_per_split)
    return DecodePlan(decode_num_splits(batch, kv_heads, m_blocks, key_blocks, num_sms, tile.ctas_per_sm), 0)
