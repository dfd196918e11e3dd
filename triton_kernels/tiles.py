"""Chooses the tile sizes and split counts of the Triton kernels, by pure functions, importable without Triton.

Comments give the reason for each number. "AOT" means that the number was checked on the machine code that Triton
generates (registers, spills, shared memory: ``tests/machine_code/test_triton_compile.py``). "Prediction" means that the
number has not been timed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from fastattn.dispatch.device import DeviceFacts

Given = ParamSpec("Given")
Tile = TypeVar("Tile", "AttentionTile", "Int8MatmulTile")


def padded_head_dim(head_dim: int) -> int:
    """Returns ``head_dim`` rounded up to a power of two, as a Triton tile can have no other width; 16 is the least."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def _pipelines_are_sound() -> bool:
    """Returns whether Triton orders its pipelines as wgmma and tcgen05 need it.

    Up to 3.7.0 it leaves out the fence.proxy.async between a pipeline's copies and the instructions that read them (its
    pull requests 9610 and 10537). 3.7.1 writes registers of A while wgmma may still read them.
    """
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = re.findall(r"\d+", importlib.metadata.version(name))[:3]
            return [int(number) for number in version] >= [3, 8]
    return True


def _with_sound_pipelines(tile_for: Callable[Concatenate[int, Given], Tile]) -> Callable[Concatenate[int, Given], Tile]:
    """Makes ``tile_for(arch, ...)`` use a single stage, which is sound, where Triton's pipelines are not."""

    @functools.wraps(tile_for)
    def sound(arch: int, /, *args: Given.args, **kwargs: Given.kwargs) -> Tile:
        tile = tile_for(arch, *args, **kwargs)
        return tile if not 90 <= arch < 120 or _pipelines_are_sound() else dataclasses.replace(tile, num_stages=1)

    return sound


# ---------------------------------------------------------------------------------------------------------------------
# Attention forward and backward
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionTile:
    """Holds an attention kernel's tile: one CTA works on ``block_m`` query rows and ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


BackwardKernel = Literal["key_value", "query", "bias"]

# A kernel and the widest head dim for which a tile is used. An entry with "padded" replaces that tile in calls with a
# narrower head dim.
TileKey = tuple[str, int] | tuple[str, int, Literal["padded"]]

# The tiles of calls that are not ``crowded`` (see `attention_forward_tile`). The comments give an SM's clocks for
# 64 x 64 scores, full and causal: predictions from the machine code for bf16 on an A100 and an H100, with as many CTAs
# on an SM as registers and shared memory allow. Differences below 8 % mean nothing. No tile spills in a main loop, even
# with padded head dims (AOT).

# 99 KB of shared memory: sm_86, sm_89, sm_120.
_SM86_TILES: dict[TileKey, AttentionTile] = {
    ("forward", 64): AttentionTile(128, 64, num_warps=4, num_stages=3),  # 850, 864; eight warps 1002, 128 x 32 986
    ("forward", 64, "padded"): AttentionTile(128, 32, num_warps=4, num_stages=3),  # 128 x 64 spills
    ("forward", 128): AttentionTile(128, 64, num_warps=8, num_stages=3),  # 1726, 1741; two stages spill
    ("forward", 128, "padded"): AttentionTile(128, 32, num_warps=8, num_stages=3),  # 128 x 64 spills
    ("forward", 256): AttentionTile(64, 32, num_warps=8, num_stages=2),  # 3291; 64 x 64 needs 104 KB
    ("forward", 512): AttentionTile(32, 32, num_warps=8, num_stages=1),  # two stages spill, and so do 64 rows
    ("query", 64): AttentionTile(128, 32, num_warps=4, num_stages=2),  # 1092, 1099; 64 x 64 1392, 128 x 64 spills
    ("query", 64, "padded"): AttentionTile(64, 64, num_warps=4, num_stages=3),  # 128 x 32 spills
    ("query", 128): AttentionTile(128, 32, num_warps=8, num_stages=2),  # 2853, 3007; 64 x 64 4169
    ("query", 256): AttentionTile(32, 32, num_warps=8, num_stages=1),  # 8344; others have not been tried
    ("key_value", 64): AttentionTile(64, 64, num_warps=4, num_stages=2),  # 1718, 1628; 32 x 64 1789, 2013
    ("key_value", 128): AttentionTile(16, 64, num_warps=4, num_stages=3),  # 3297, 3322; 32 x 64, eight warps, 4008
    ("key_value", 256): AttentionTile(32, 32, num_warps=8, num_stages=1),
}

# 163 KB: sm_80, sm_87.
_SM80_TILES: dict[TileKey, AttentionTile] = _SM86_TILES | {
    ("query", 128): AttentionTile(128, 64, num_warps=8, num_stages=3),  # 2304, 2257, in 128 KB
    ("query", 128, "padded"): AttentionTile(128, 32, num_warps=8, num_stages=2),  # 128 x 64 spills
}

# Three stages: with two, warps wait for cp.async a third of the time. Products of fewer than 64 rows (block_m, or
# block_n for key_value) would use mma.sync. Keys and values through descriptors (TMA) gain 8 % at most, and each
# descriptor costs the host microseconds per launch.
_SM90_TILES: dict[TileKey, AttentionTile] = {
    ("forward", 64): AttentionTile(128, 64, num_warps=4, num_stages=3),  # 525, 527; eight warps 712
    ("forward", 64, "padded"): AttentionTile(128, 32, num_warps=4, num_stages=3),  # 128 x 64 spills
    ("forward", 128): AttentionTile(128, 64, num_warps=8, num_stages=3),  # 1008, 994; two stages 1664
    ("forward", 256): AttentionTile(128, 32, num_warps=8, num_stages=3),  # 2074, 2067; 64 x 32 2328, 64 x 64 spills
    ("forward", 256, "padded"): AttentionTile(64, 32, num_warps=8, num_stages=3),  # 128 x 32 spills
    ("forward", 512): AttentionTile(32, 32, num_warps=8, num_stages=1),  # two stages spill
    ("query", 64): AttentionTile(128, 32, num_warps=4, num_stages=3),  # 656, 660; 64 x 64 693, 128 x 64 spills
    ("query", 128): AttentionTile(128, 64, num_warps=8, num_stages=3),  # 1176, 1174; 64 x 64 1332
    ("query", 256): AttentionTile(64, 32, num_warps=8, num_stages=3),  # 3508, 3512; 32 x 32 9710, 64 x 64 spills
    ("key_value", 64): AttentionTile(64, 64, num_warps=4, num_stages=3),  # 855, 861; 32 x 64 1116, 64 x 128 982
    ("key_value", 128): AttentionTile(64, 64, num_warps=8, num_stages=3),  # 1586, 1586; 32 x 64, four warps, 1627
    ("key_value", 128, "padded"): AttentionTile(32, 64, num_warps=4, num_stages=3),  # 64 x 64 spills
    ("key_value", 256): AttentionTile(32, 32, num_warps=8, num_stages=3),  # 7540, 7312; one stage 10318, 16 x 64 spills
}

# sm_100, sm_103, ...: tiles that do not spill; nothing is predicted.
_SM100_TILES: dict[TileKey, AttentionTile] = {
    ("forward", 64): AttentionTile(128, 64, num_warps=8, num_stages=3),
    ("forward", 128): AttentionTile(128, 64, num_warps=8, num_stages=2),
    ("forward", 128, "padded"): AttentionTile(128, 32, num_warps=8, num_stages=2),
    ("forward", 256): AttentionTile(64, 32, num_warps=8, num_stages=2),
    ("forward", 512): AttentionTile(32, 32, num_warps=8, num_stages=1),  # two stages spill
    ("query", 64): AttentionTile(64, 64, num_warps=4, num_stages=2),
    ("query", 128): AttentionTile(64, 64, num_warps=8, num_stages=2),
    ("query", 256): AttentionTile(32, 32, num_warps=8, num_stages=1),
    ("key_value", 64): AttentionTile(32, 64, num_warps=4, num_stages=2),
    ("key_value", 128): AttentionTile(32, 64, num_warps=8, num_stages=2),
    ("key_value", 256): AttentionTile(32, 32, num_warps=8, num_stages=1),
}


def _plain_tile(arch: int, kernel: str, head_dim: int, value_dim: int) -> AttentionTile:
    """Returns the tile from the tables above."""
    if arch in (80, 87):
        tiles = _SM80_TILES
    elif 90 <= arch < 100:
        tiles = _SM90_TILES
    elif 100 <= arch < 120:
        tiles = _SM100_TILES
    else:
        tiles = _SM86_TILES
    width = next(width for width in (64, 128, 256, 512) if max(head_dim, value_dim) <= width)
    tile = tiles[kernel, width]
    return tile if head_dim == value_dim == width else tiles.get((kernel, width, "padded"), tile)


@_with_sound_pipelines
def attention_forward_tile(arch: int, head_dim: int, value_dim: int, crowded: bool = False) -> AttentionTile:
    """Returns the tile of `attention_forward_kernel`.

    ``crowded`` calls have a bias, ALiBi, softcap, dropout or ranges of keys, which need registers for every score, or
    pages, which need registers for every key. Their tiles are the same on all architectures, and fit 99 KB (AOT).
    """
    width = max(padded_head_dim(head_dim), padded_head_dim(value_dim))
    if not crowded:
        return _plain_tile(arch, "forward", head_dim, value_dim)
    if width <= 64:
        # 128 x 64 spills on sm_80 and sm_90, and so does 64 x 64 with four warps where the width is padded (AOT).
        return AttentionTile(64, 64, num_warps=8, num_stages=2)
    if width <= 128:
        return AttentionTile(64, 32, num_warps=8, num_stages=2)  # 64 x 64 and 128 x 32 spill on sm_90 (AOT)
    return AttentionTile(32, 32, num_warps=8, num_stages=1)  # 64 x 32 spills on sm_90 (AOT)


@_with_sound_pipelines
def attention_backward_tile(
    arch: int, head_dim: int, value_dim: int, kernel: BackwardKernel, crowded: bool = False
) -> AttentionTile:
    """Returns the tile of a backward kernel: "key_value" (dK, dV), "query" (dQ, delta and the slopes' gradient) or
    "bias" (its gradient).

    ``crowded`` says whether scores go through more than scaling, a window and ranges of keys; the other parameters are
    those of `attention_forward_tile`.
    """
    width = max(padded_head_dim(head_dim), padded_head_dim(value_dim))
    if kernel == "bias":  # always crowded; its accumulator is the tile itself
        if width <= 64:
            return AttentionTile(32, 32, num_warps=4, num_stages=2)  # 64 x 32 spills on sm_100 (AOT)
        # Take eight warps: with four, 64 x 32 spills on sm_100 (AOT). From 256 dims on, two stages exceed 99 KB.
        return AttentionTile(64, 32, num_warps=8, num_stages=2 if width <= 128 else 1)
    if not crowded:
        return _plain_tile(arch, kernel, head_dim, value_dim)
    if width > 128:
        # The accumulators are 256 columns wide, so 32 x 32 spills on sm_100, in either kernel (AOT).
        return AttentionTile(*((32, 16) if kernel == "query" else (16, 32)), num_warps=8, num_stages=1)
    if kernel == "query":
        if width <= 64:
            return AttentionTile(32, 32, num_warps=4, num_stages=2)  # 64 x 32 spills on sm_80 and sm_100 (AOT)
        return AttentionTile(64, 32, num_warps=8, num_stages=2)  # 64 x 64 spills on sm_90 (AOT)
    return AttentionTile(32, 32, num_warps=4, num_stages=2)  # 32 x 64 spills on sm_80 and sm_90 (AOT)


def describe_attention(
    facts: DeviceFacts, head_dim: int, value_dim: int, features: frozenset[str]
) -> tuple[str, AttentionTile]:
    """Returns the forward kernel's name and tile, for ``fastattn.explain``; ``features`` are those of
    fastattn.dispatch.support."""
    crowded = bool(features & {"mask", "bias", "alibi", "softcap", "dropout", "paged", "key ranges"})
    return "attention_forward.attention_forward_kernel", attention_forward_tile(
        facts.arch, head_dim, value_dim, crowded
    )


# ---------------------------------------------------------------------------------------------------------------------
# Splitting a reduction over CTAs (flash-decoding, int8 matmul)
# ---------------------------------------------------------------------------------------------------------------------

# The unit of cost is the time that one CTA takes for one step of its main loop. The numbers are estimated from
# latencies, not measured: a step is one DRAM round trip spread over the stages in flight, about 0.4 us.
SPLIT_SETUP_STEPS = 2.0  # launch, indices, first loads, epilogue: about 1 us
SPLIT_MERGE_STEPS = 6.0  # the second kernel's launch and its first loads: 2 to 3 us
SPLIT_MERGE_STEPS_PER_SPLIT = 1 / 16  # the merge reads 16 partial results per round trip


def ceil_div(a: int, b: int) -> int:
    """Returns ``a / b`` rounded up."""
    return -(-a // b)


def split_cost(tiles: int, steps: int, slots: int, splits: int) -> float:
    """Estimates the time of ``tiles`` results of ``steps`` loop steps each; ``splits`` CTAs share a result, and
    ``slots`` CTAs run at a time.

        ceil(tiles * splits / slots) * (setup + ceil(steps / splits)) + (merge(splits) if splits > 1)

    Unlike a threshold on how full the SMs are, a sum of costs has no cliff between neighbouring sizes.
    """
    waves = ceil_div(tiles * splits, max(1, slots))
    merge = SPLIT_MERGE_STEPS + splits * SPLIT_MERGE_STEPS_PER_SPLIT if splits > 1 else 0.0
    return waves * (SPLIT_SETUP_STEPS + ceil_div(steps, splits)) + merge


# ---------------------------------------------------------------------------------------------------------------------
# Flash-decoding
# ---------------------------------------------------------------------------------------------------------------------

# Bounds the fp32 partial results (num_splits times the output) and the combine kernel's loop. With a single sequence
# and KV head, 256 splits fill the 2 x 132 CTA slots of an H200.
DECODE_MAX_SPLITS = 256

# A batch-invariant split always has this many keys, whatever else is in the batch. 1024 keys of 128 + 128
# 16-bit dims are 512 KB of cache, of which the partial result of 16 rows, written and read (16 KB), is 3 %.
DECODE_INVARIANT_SPLIT_KEYS = 1024


@dataclass(frozen=True)
class DecodeTile:
    """Holds the constexprs of `decode.split_kernel`: a tile's rows (query heads of one KV head times queries) and
    keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int


def decode_tile(
    head_dim: int, value_dim: int, rows: int, cache_itemsize: int, shared_memory_bytes: int, page_size: int = 0
) -> DecodeTile:
    """Returns the tile of `decode.split_kernel` for ``rows`` = Sq * Hq / Hkv packed query rows.

    The tile must not depend on the batch, because a row's bits depend on the tile (batch_invariant). ``cache_itemsize``
    is the bytes of a cached element (1 for int8 and fp8), ``shared_memory_bytes`` the limit for one CTA; ``page_size``
    is 0 for a contiguous cache.
    """
    key_width, value_width = padded_head_dim(head_dim), padded_head_dim(value_dim)
    width = key_width + value_width
    # An MMA takes at least 16 rows. 64 rows spill registers in the loop (AOT: on sm_80 at 64 + 64 dims, on sm_90 at
    # 128 + 128 with a paged cache); further row tiles read the same keys from L2.
    block_m = min(32, max(16, 1 << (rows - 1).bit_length()))
    # Four warps are enough until the accumulator, and RoPE on the whole query tile before the loop, spill (AOT).
    num_warps = 8 if block_m == 32 or width > 256 else 4
    # 64 keys of 128 + 128 16-bit dims are 32 KB, a good amount to keep in flight. Wider heads get fewer keys, of as
    # many bytes. With more than 256 dims, 32 keys spill with 32 rows (AOT).
    block_n = 64 if width <= 256 else 32 if width <= 512 else 16

    # Shared memory outside the pipeline (AOT): the query tile and the probabilities, 16-bit.
    fixed_bytes = 2 * (block_m * key_width + block_m * block_n) + (1024 if width > 512 else 0)
    block_bytes = block_n * width * cache_itemsize
    # Two CTAs on an SM hide each other's softmax, prologue and epilogue, if each CTA has two blocks in flight.
    # Bandwidth needs some 29 KB per SM in flight (4.8 TB/s times 0.8 us over 132 SMs). More than three blocks only
    # lengthen the prologue.
    for ctas_per_sm in (2, 1):
        buffers = min(3, (shared_memory_bytes // ctas_per_sm - fixed_bytes) // block_bytes)
        if buffers >= 2:
            break
    # Triton's pipeliner gives num_stages - 1 buffers to an mma.sync loop, and half of that where the addresses come
    # from a gather of page ids, which is pipelined as well (AOT).
    gathers = page_size % block_n != 0
    return DecodeTile(block_m, block_n, num_warps, 1 + buffers * (2 if gathers else 1), ctas_per_sm)


def decode_key_blocks(capacity: int, num_queries: int, window_left: int, block_n: int) -> int:
    """Returns the most blocks of ``block_n`` keys that a sequence's queries see together (``window_left`` < 0: all)."""
    num_blocks = ceil_div(capacity, block_n)
    if window_left < 0:
        return num_blocks
    # The queries have the last num_queries positions, so no key is right of them, and they see window_left more keys on
    # the left. If these begin in the middle of a block, they touch one block more than they fill.
    return min(num_blocks, ceil_div(window_left + num_queries - 1, block_n) + 1)


def decode_num_splits(
    batch: int, kv_heads: int, m_blocks: int, key_blocks: int, num_sms: int, ctas_per_sm: int = 2
) -> int:
    """Returns into how many splits each sequence of up to ``key_blocks`` blocks of keys is divided.

    The least estimated time wins (`split_cost`). That gives 1 for many sequences or heads, where more splits only add
    waves; splits that fill the GPU for a single sequence; and 1 for few blocks, where the merge costs more than it
    saves. The host only knows the capacity, so a shorter sequence has shorter splits, not fewer.
    """
    tiles, slots = batch * kv_heads * m_blocks, num_sms * ctas_per_sm
    candidates = range(1, max(1, min(key_blocks, DECODE_MAX_SPLITS)) + 1)
    return min(candidates, key=lambda splits: split_cost(tiles, key_blocks, slots, splits))


@dataclass(frozen=True)
class DecodeSplits:
    """Says how a sequence's key blocks are split: ``blocks_per_split`` for each split, or evenly if that is 0."""

    num_splits: int
    blocks_per_split: int


@functools.lru_cache(maxsize=4096)
def decode_splits(
    batch: int,
    kv_heads: int,
    m_blocks: int,
    key_blocks: int,
    num_sms: int,
    tile: DecodeTile,
    requested_splits: int = 0,
    batch_invariant: bool = False,
) -> DecodeSplits:
    """Returns the splits of a call; ``requested_splits`` > 0 is honoured, up to ``key_blocks`` (`decode_key_blocks`).

    With ``batch_invariant``, splits are `DECODE_INVARIANT_SPLIT_KEYS` long (longer where `DECODE_MAX_SPLITS` of them do
    not hold ``key_blocks``), so that the cuts of a sequence depend on that sequence alone.
    """
    if requested_splits > 0:
        return DecodeSplits(max(1, min(requested_splits, key_blocks)), 0)
    if batch_invariant:
        blocks_per_split = max(DECODE_INVARIANT_SPLIT_KEYS // tile.block_n, ceil_div(key_blocks, DECODE_MAX_SPLITS))
        return DecodeSplits(max(1, ceil_div(key_blocks, blocks_per_split)), blocks_per_split)
    return DecodeSplits(decode_num_splits(batch, kv_heads, m_blocks, key_blocks, num_sms, tile.ctas_per_sm), 0)


# ---------------------------------------------------------------------------------------------------------------------
# int8 matmul
# ---------------------------------------------------------------------------------------------------------------------

# Bounds the fp32 partial results; beyond 16 splits, the merge reads more than a split saves.
INT8_MAX_SPLITS = 16


@dataclass(frozen=True)
class Int8MatmulTile:
    """Holds `int8_matmul`'s constexprs: ``block_m`` tokens, ``block_n`` outputs, steps of ``block_k``."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int


@functools.lru_cache(maxsize=4096)
@_with_sound_pipelines
def int8_matmul_tile(
    arch: int, m: int, n: int, k: int, group: int, shared_memory_bytes: int, num_sms: int
) -> Int8MatmulTile:
    """Returns the tile of ``[m, k] x [n, k] -> [m, n]``; ``group`` is the width of a scale's group along k, or 0.

    For the gradient of the input, n is that matmul's output width (the weight's K) and k its depth (the weight's N).
    """
    # At small m the weights are the cost: every CTA takes all tokens, so that each weight is read once.
    block_m = min(128, max(16, 1 << (max(m, 1) - 1).bit_length()))
    large = block_m == 128
    # 128 x 128 is the smallest tile at which 16-bit operands from L2 do not bind the tensor cores; 64 weight rows make
    # enough CTAs at small m (128 CTAs at n = 8192), and one wgmma takes 64 rows.
    block_n = 128 if large else 64
    # 128 bytes of a weight row are a whole cache line. A step is within one group, because it applies one scale.
    block_k = min(64 if large else 128, group or 128)
    # Take eight warps where the accumulator (twice with groups: the step's own and the total) and the converted weights
    # would fill the registers of four (AOT: the gradient spills at m = 64 on sm_80).
    num_warps = 8 if block_m >= 64 else 4
    # Bandwidth needs bytes in flight: at small m, 32 KB for each of two CTAs on an SM, in more stages if a group makes
    # the stages small. At large m, the stages only need to hide latency.
    step_bytes = block_n * block_k + block_m * block_k * 2
    ctas_per_sm = 1 if large else 2
    # Besides the pipeline, one step's weights as 16-bit numbers need room: wgmma and tcgen05 may want them in shared
    # memory.
    converted_bytes = 2 * block_n * block_k if arch >= 90 else 0
    room = (shared_memory_bytes // ctas_per_sm - converted_bytes) // step_bytes
    num_stages = max(2, min(max(4, min(8, 32 * 1024 // step_bytes)), room))
    tiles, steps = ceil_div(m, block_m) * ceil_div(n, block_n), ceil_div(k, block_k)
    candidates = range(1, max(1, min(steps, INT8_MAX_SPLITS)) + 1)
    split_k = min(candidates, key=lambda splits: split_cost(tiles, steps, num_sms * ctas_per_sm, splits))
    return Int8MatmulTile(block_m, block_n, block_k, num_warps, num_stages, split_k)
