"""Lists the tiles of scores in which ranges of visible keys let some row see a key, so that kernels visit no others.

A kernel walks along a line of tiles: a tile of rows over tiles of keys, or a tile of keys over tiles of rows. The list
of a line is int32 ``[2 + length]``: the number of full tiles (every row sees all keys), the number of tiles in which
some row sees a key, and the indices of the tiles in which some row sees a key. The full tiles come first, and both
groups are in ascending order.

`tile_states_kernel` reads the ranges of every row once and writes a byte for each tile; `list_tiles_kernel` makes the
list of a line from its bytes. In a packed call, the tiles of one sequence follow those of the sequence before. Each
sequence has a spare tile, so that the host can allocate the lists without knowing the lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import NO_BIAS, NOT_SPECIALIZED, sequence_range, tile_range
from fastattn.triton_kernels.attention_launch import Arguments, launch
from fastattn.triton_kernels.attention_pages import key_range
from fastattn.triton_kernels.tiles import ceil_div

EMPTY, PARTLY_SEEN, FULLY_SEEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the byte of a tile
TILES_AT_ONCE = tl.constexpr(32)  # tiles of a line that a program reads at a time


@triton.jit
def first_tile(begin, batch, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the index of a sequence's first tile among the tiles of all packed sequences. ``begin`` is the first row
    of the sequence in the tensor."""
    if PACKED:
        return (begin // BLOCK + batch).to(tl.int64)
    else:
        return tl.zeros([], tl.int64)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def tile_states_kernel(
    states, ranges, cu_seqlens_q, cu_seqlens_k,
    stride_ranges_b, stride_ranges_h, stride_states_b, stride_states_h,
    num_range_heads, max_seqlen_q, max_seqlen_k, total_q, total_k, window_left, window_right, query_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr,
    PLACED: tl.constexpr, PACKED: tl.constexpr, PAGED: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Writes a byte for each tile of keys that a tile of rows meets. Grid: (row tiles * heads * batches of the ranges).

    With ``MASK_ALL``, no tile counts as full, because a bias or a missing page may hide keys too.
    """
    num_m_tiles, num_n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M), tl.cdiv(max_seqlen_k, BLOCK_N)
    m_tile = tl.program_id(0) % num_m_tiles
    head = (tl.program_id(0) // num_m_tiles % num_range_heads).to(tl.int64)
    batch = (tl.program_id(0) // num_m_tiles // num_range_heads).to(tl.int64)
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    _begin_k, seqlen_k = key_range(cu_seqlens_k, batch, total_k, max_seqlen_k, PAGED)
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if m_tile * BLOCK_M >= seqlen_q:
        return
    offset = query_offset if PLACED else seqlen_k - seqlen_q
    low = tl.zeros([BLOCK_M], tl.int32)
    high = low + seqlen_k
    if LEFT:
        low = tl.maximum(low, row + offset - window_left)
    if RIGHT:
        high = tl.minimum(high, row + offset + window_right + 1)
    own = ranges + batch * stride_ranges_b + head * stride_ranges_h + (begin_q + row).to(tl.int64) * (2 * RANGES)
    packed_tile = first_tile(begin_q, batch, PACKED, BLOCK_M) + m_tile
    line = states + batch * stride_states_b + head * stride_states_h + packed_tile * num_n_tiles
    for first in range(0, tl.cdiv(seqlen_k, BLOCK_N), TILES_AT_ONCE):
        n_tile = first + tl.arange(0, TILES_AT_ONCE)
        sees_any = tl.zeros([BLOCK_M, TILES_AT_ONCE], tl.int32)
        sees_all = tl.zeros([BLOCK_M, TILES_AT_ONCE], tl.int32)
        for r in tl.static_range(RANGES):
            begin = tl.maximum(tl.load(own + 2 * r, mask=row < seqlen_q, other=0), low)[:, None]
            end = tl.minimum(tl.load(own + 2 * r + 1, mask=row < seqlen_q, other=0), high)[:, None]
            first_key = (n_tile * BLOCK_N)[None, :]
            meets = (begin < end) & (begin < first_key + BLOCK_N) & (end > first_key)
            holds = (begin <= first_key) & (end >= first_key + BLOCK_N)
            sees_any |= meets.to(tl.int32)
            sees_all |= holds.to(tl.int32)
        state = tl.max(sees_any, 0) * PARTLY_SEEN
        if not MASK_ALL:
            state = tl.where(tl.min(sees_all, 0) > 0, FULLY_SEEN, state)  # never if the tile has rows past the end
        tl.store(line + n_tile, state.to(tl.int8), mask=n_tile < num_n_tiles)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def list_tiles_kernel(
    tiles, states, cu_seqlens_q, cu_seqlens_k, stride_tiles_b, stride_tiles_h, stride_states_b, stride_states_h,
    num_range_heads, max_seqlen_q, max_seqlen_k, total_q, total_k, num_listed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, PAGED: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Lists the tiles of keys that a tile of rows meets, or with ``OF_KEYS`` the tiles of rows that a tile of keys
    meets. Grid: (lists of a head * heads * batches of the ranges)."""
    num_m_tiles, num_n_tiles = tl.cdiv(max_seqlen_q, BLOCK_M), tl.cdiv(max_seqlen_k, BLOCK_N)
    num_lines = num_n_tiles if OF_KEYS else num_m_tiles
    tile = tl.program_id(0) % num_lines
    head = (tl.program_id(0) // num_lines % num_range_heads).to(tl.int64)
    batch = (tl.program_id(0) // num_lines // num_range_heads).to(tl.int64)
    begin_q, seqlen_q = sequence_range(cu_seqlens_q, batch, total_q, max_seqlen_q)
    begin_k, seqlen_k = key_range(cu_seqlens_k, batch, total_k, max_seqlen_k, PAGED)
    first = states + batch * stride_states_b + head * stride_states_h
    first += first_tile(begin_q, batch, PACKED, BLOCK_M) * num_n_tiles
    if OF_KEYS:
        packed_tile = first_tile(begin_k, batch, PACKED, BLOCK_N) + tile
        states_of_line, stride = first + tile, num_n_tiles
        num_met, exists = tl.cdiv(seqlen_q, BLOCK_M), tile * BLOCK_N < seqlen_k
    else:
        packed_tile = first_tile(begin_q, batch, PACKED, BLOCK_M) + tile
        states_of_line, stride = first + tl.cast(tile, tl.int64) * num_n_tiles, 1
        num_met, exists = tl.cdiv(seqlen_k, BLOCK_N), tile * BLOCK_M < seqlen_q
    if not exists:
        return
    own = tiles + batch * stride_tiles_b + head * stride_tiles_h + packed_tile * (2 + num_listed)
    count = 0
    for state in tl.static_range(FULLY_SEEN, EMPTY, -1):
        for met in range(0, num_met, TILES_AT_ONCE):
            others = met + tl.arange(0, TILES_AT_ONCE)
            found = tl.load(states_of_line + others.to(tl.int64) * stride, mask=others < num_met, other=EMPTY) == state
            behind = tl.cumsum(found.to(tl.int32), 0)  # how many are found up to each, itself included
            tl.store(own + (1 + count) + behind, others, mask=found)
            count += tl.max(behind, 0)
        tl.store(own + (FULLY_SEEN - state), count)


@triton.jit
def find_list(
    tiles, batch, head, stride_tiles_b, stride_tiles_h, tile, begin, length, num_complete, cu_seqlens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the list of a sequence's ``tile`` of rows or keys. Returns the address of its first entry, how many of its
    tiles are full, and how many it has.

    ``begin`` is the sequence's first row or key in the packed tensor. A sequence has ``num_complete`` tiles without a
    row or key past its end: no more tiles count as full, even if wrong offsets made the list say so."""
    packed_tile = first_tile(begin, batch, cu_seqlens is not None, BLOCK) + tile
    own = tiles + (batch * stride_tiles_b + head * stride_tiles_h + packed_tile * (2 + length))
    return own + 2, tl.minimum(tl.load(own), num_complete), tl.load(own + 1)


@triton.jit
def tiles_of_rows(
    tiles, batch, head, stride_tiles_b, stride_tiles_h, num_listed, begin_q, cu_seqlens_q, first_row, last_row, offset,
    window_left, window_right, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """Returns the tiles of keys that a tile of rows walks over: ``begin``, ``full_begin``, ``full_end`` and ``end``, as
    `tile_range` does, and the address of the tile list. With ranges, the four numbers index that list. Without ranges
    there is no list, and nothing must read the address."""
    if RANGES > 0:
        listed, full_end, end = find_list(
            tiles, batch, head, stride_tiles_b, stride_tiles_h, first_row // BLOCK_M, begin_q, num_listed,
            seqlen_k // BLOCK_N, cu_seqlens_q, BLOCK_M,
        )  # fmt: skip
        return 0, 0, full_end, end, listed
    else:
        begin, full_begin, full_end, end = tile_range(
            first_row, last_row, offset, window_left, window_right, seqlen_k, BLOCK_N, LEFT, RIGHT
        )
        return begin, full_begin, full_end, end, end  # `end` as the address: Triton 3.6 cannot return None


def list_tiles(arguments: Arguments, of_keys: bool = False) -> Arguments:
    """Makes a tile list for each tile of rows, or with ``of_keys`` for each tile of keys.

    ``arguments`` holds all other arguments of an attention kernel. Returns the arguments by which that kernel finds the
    lists. Without ranges, launches nothing and returns None and zeros.
    """
    ranges, is_packed = arguments["ranges"], arguments["cu_seqlens_q"] is not None
    if ranges is None:
        return {"tiles": None, "stride_tiles_b": 0, "stride_tiles_h": 0, "num_listed": 0}
    batches, heads = arguments["num_range_batches"], arguments["num_range_heads"]
    block_m, block_n = arguments["BLOCK_M"], arguments["BLOCK_N"]
    num_m, num_n = ceil_div(arguments["max_seqlen_q"], block_m), ceil_div(arguments["max_seqlen_k"], block_n)
    outer, lines_m, lines_n = batches, num_m, num_n
    if is_packed:
        lines_m, lines_n = arguments["total_q"] // block_m + batches, arguments["total_k"] // block_n + batches
        outer = 1
    lines, length = (lines_n, num_m) if of_keys else (lines_m, num_n)
    states = ranges.new_empty((outer, heads, lines_m, num_n), dtype=torch.int8)
    # Zeros make every entry a valid tile, even if wrong offsets let sequences overlap.
    tiles = ranges.new_zeros((outer, heads, lines, 2 + length))
    lists = {
        "tiles": tiles,
        "stride_tiles_b": 0 if outer == 1 else tiles.stride(0),
        "stride_tiles_h": 0 if heads == 1 else tiles.stride(1),
        "num_listed": length,
    }
    arguments = {
        **arguments,
        **lists,
        "states": states,
        "stride_states_b": 0 if outer == 1 else states.stride(0),
        "stride_states_h": states.stride(1),
        "PACKED": is_packed,
        "PAGED": arguments.get("PAGE_SIZE", 0) > 0,
        "MASK_ALL": arguments["BIAS"] != NO_BIAS.value or arguments.get("PAGE_SIZE", 0) > 0,
        "OF_KEYS": of_keys,
    }
    launch(tile_states_kernel, num_m * heads * batches, arguments)
    launch(list_tiles_kernel, (num_n if of_keys else num_m) * heads * batches, arguments)
    return lists
