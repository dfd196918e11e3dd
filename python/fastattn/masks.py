"""Makes the ranges of visible keys that ``attention`` and ``attention_varlen`` take as ``key_ranges``.

Ranges are int32 ``[B or 1, H or 1, Sq, R, 2]``: each query sees the keys of up to four half-open ranges ``[begin,
end)``. They need O(S) memory where a bool mask needs O(S²), and kernels skip tiles in which no query sees a key. For
packed sequences, ranges are ``[H or 1, total_q, R, 2]``, and positions of keys count from the sequence's first key.
``torch.cat([a[0], b[0]], dim=1)`` packs the ranges of two sequences with equal R.

Example:
    >>> ranges = fastattn.masks.shared_prompt(4, [3, 3])  # one prompt, two answers
    >>> print(fastattn.masks.show(ranges, num_keys=10))
    █·········
    ██········
    ███·······
    ████······
    █████·····
    ██████····
    ███████···
    ████···█··
    ████···██·
    ████···███
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.checks import check_dtype, check_int, check_rank, check_tensor, expect, type_name
from fastattn.functional.attention_checks import MOST_RANGES, check_window
from fastattn.reference import mask_of_ranges


def documents(cu_seqlens: Tensor, *, causal: bool = True, seqlen: int | None = None) -> Tensor:
    """Returns ranges ``[1, 1, S, 1, 2]`` with which each token sees its own document, up to itself if ``causal``.

    Document ``i`` is the tokens from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]`` (int32 ``[N + 1]``). ``seqlen`` is
    S; tokens outside of all documents see nothing. By default, S is the last offset, which the host reads from the
    device.
    """
    check_tensor("cu_seqlens", cu_seqlens)
    check_rank("cu_seqlens", cu_seqlens, "[N + 1]")
    length = int(cu_seqlens[-1]) if seqlen is None else check_int("seqlen", seqlen, minimum=0)
    token = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    offsets = torch.cat([cu_seqlens.to(torch.int32), cu_seqlens.new_full((1,), length, dtype=torch.int32)])
    document = torch.searchsorted(offsets[1:-1].contiguous(), token, right=True)
    begin = offsets[document]
    is_inside = (token >= offsets[0]) & (token < offsets[-2])
    end = torch.where(is_inside, token + 1 if causal else offsets[document + 1], begin)
    return _ranges((begin, end))[None, None].clamp(max=length)


def prefix(lengths: int | Tensor, seqlen: int, *, device: Any = None) -> Tensor:
    """Returns ranges ``[B, 1, S, 1, 2]`` of a prefix language model: each token sees the first ``lengths[b]`` tokens,
    and all tokens up to itself (Raffel et al., "T5", 2020, section 3.2.1). ``lengths`` is an int or ``[B]``."""
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=device).reshape(-1, 1)
    seqlen = check_int("seqlen", seqlen, minimum=0)
    token = torch.arange(seqlen, dtype=torch.int32, device=lengths.device)
    end = torch.maximum(lengths, token + 1).clamp(max=seqlen)
    return _ranges((torch.zeros_like(end), end))[:, None]


def shared_prompt(prompt: int, answers: Sequence[int], *, device: Any = None) -> Tensor:
    """Returns ranges ``[1, 1, S, 2, 2]`` for one sequence of a prompt and several answers: a token of an answer sees
    the prompt and its own answer up to itself, but no other answer.

    ``prompt`` and ``answers`` are numbers of tokens. For rotary embedding, let every answer's positions continue from
    the end of the prompt. Do not combine these ranges with ``window`` or ``alibi_slopes``, which use positions in the
    whole sequence.
    """
    sizes = [check_int("prompt", prompt, minimum=0), *(check_int("answers", n, minimum=0) for n in answers)]
    token = torch.arange(sum(sizes), dtype=torch.int32, device=device)
    lengths = torch.tensor(sizes, device=device)
    begin = (lengths.cumsum(0) - lengths).to(torch.int32).repeat_interleave(lengths)
    end_of_prompt = torch.where(begin > 0, sizes[0], 0).to(torch.int32)
    return _ranges((torch.zeros_like(begin), end_of_prompt), (begin, token + 1))[None, None]


def window_and_global(
    seqlen: int, window: tuple[int, int], num_global: int, *, causal: bool = False, device: Any = None
) -> Tensor:
    """Returns ranges ``[1, 1, S, 2, 2]`` with which each token sees the first ``num_global`` tokens and a ``window`` of
    tokens around itself, ``(left, right)`` as in ``attention``. The first ``num_global`` tokens see all tokens (Beltagy
    et al., "Longformer", 2020). With ``causal`` no token sees a later one (Xiao et al., "attention sinks", 2024)."""
    seqlen, num_global = check_int("seqlen", seqlen, minimum=0), check_int("num_global", num_global, minimum=0)
    left, right = (seqlen if side < 0 else min(side, seqlen) for side in check_window(window))
    token = torch.arange(seqlen, dtype=torch.int32, device=device)
    begin = (token - left).clamp(min=min(num_global, seqlen))
    end = (token + right).clamp(max=seqlen - 1) + 1
    end = torch.where(token < num_global, seqlen, end)
    begin = torch.where(token < num_global, num_global, begin).clamp(max=seqlen)
    if causal:
        end = torch.minimum(end, token + 1)
    global_end = (token + 1 if causal else torch.full_like(token, seqlen)).clamp(max=num_global)
    return _ranges((torch.zeros_like(token), global_end), (begin, torch.maximum(begin, end)))[None, None]


def tree(parents: Sequence[int] | Tensor, *, device: Any = None) -> Tensor:
    """Returns ranges ``[1, 1, S, R, 2]`` with which a token of a tree sees itself and its ancestors. ``parents[i]`` is
    an earlier token than ``i``, or -1 for a root. A token needs one range for each run of consecutive positions among
    itself and its ancestors.

    Raises:
        InputError: a token needs more than four ranges, or its parent does not come before it.
    """
    paths: list[list[tuple[int, int]]] = []
    for token, parent in enumerate(parents.tolist() if isinstance(parents, Tensor) else parents):
        check_int("parents", parent)
        expect(-1 <= parent < token, "parents", f"-1 or an earlier token for token {token}", parent)
        path = list(paths[parent]) if parent >= 0 else []
        if path and path[-1][1] == token:
            path[-1] = (path[-1][0], token + 1)
        else:
            path.append((token, token + 1))
        _expect_few("parents", len(path), token, "a bool mask as bias of attention, or tree_mask over a cache,")
        paths.append(path)
    most = max(map(len, paths), default=1)
    padded = [path + [(0, 0)] * (most - len(path)) for path in paths]
    return torch.tensor(padded, dtype=torch.int32, device=device).reshape(1, 1, len(paths), most, 2)


def from_bool(mask: Tensor) -> Tensor:
    """Converts a bool mask ``[…, Sq, Sk]``, True = attend, to ranges ``[…, Sq, R, 2]``. The host waits for the GPU.
    ``attention`` takes the ranges of a mask ``[B or 1, H or 1, Sq, Sk]``.

    Raises:
        InputError: a query sees more than four ranges of keys; the message names the first such query.
    """
    check_tensor("mask", mask)
    check_dtype("mask", mask, (torch.bool,))
    return _ranges_of(mask, first_query=0)


def _ranges_of(mask: Tensor, first_query: int) -> Tensor:
    """Converts ``mask`` as ``from_bool`` does. Errors name row ``i`` of ``mask`` as query ``first_query + i``."""
    edge = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff()  # 1 at a range's first key, -1 one past its last
    begins = edge[..., :-1] == 1
    counts = begins.sum(-1)
    most = int(counts.max()) if counts.numel() else 0
    if most > MOST_RANGES:
        *_, query = row = (counts > MOST_RANGES).nonzero()[0].tolist()
        _expect_few("mask", int(counts[tuple(row)]), first_query + query, "the mask as bias of attention")
    ranges = torch.zeros(*counts.shape, max(1, most), 2, dtype=torch.int32, device=mask.device)
    before_row = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)  # ranges before each row
    for side, is_edge in enumerate((begins, edge[..., 1:] == -1)):
        edges = is_edge.nonzero(as_tuple=True)
        number = torch.arange(len(edges[-1]), device=mask.device) - before_row[edges[:-1]]
        index = *edges[:-1], number, torch.full_like(number, side)
        ranges[index] = (edges[-1] + side).to(torch.int32)
    return ranges


def to_bool(ranges: Tensor, num_keys: int) -> Tensor:
    """Converts ranges ``[…, Sq, R, 2]`` to a bool mask ``[…, Sq, num_keys]``, True = attend."""
    check_tensor("ranges", ranges)
    return mask_of_ranges(ranges, check_int("num_keys", num_keys, minimum=0))


def from_block_mask(block_mask: Any) -> Tensor:
    """Converts a ``BlockMask`` of ``torch.nn.attention.flex_attention`` to ranges ``[B, H, Sq, R, 2]``. To save memory,
    it evaluates the mask for one block of rows at a time.

    Raises:
        InputError: a query sees more than four ranges of keys; the message names the first such query.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        expected = "a BlockMask, as torch.nn.attention.flex_attention.create_block_mask returns"
        raise TypeError(f"block_mask: expected {expected}, got {type_name(block_mask)}; from_bool takes a bool mask")
    batch, heads, num_queries, num_keys = block_mask.shape
    block_m, block_n = block_mask.BLOCK_SIZE
    partly = _dense_blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    fully = torch.zeros_like(partly)
    if block_mask.full_kv_num_blocks is not None:
        fully = _dense_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    indices = [torch.arange(size, device=partly.device) for size in (batch, heads, num_queries, num_keys)]
    sees = block_mask.mask_mod
    for dim in (3, 2, 1, 0):  # mask_mod takes scalar indices
        sees = torch.vmap(sees, in_dims=tuple(0 if each == dim else None for each in range(4)))
    if num_queries == 0:
        return torch.zeros(batch, heads, 0, 1, 2, dtype=torch.int32, device=partly.device)
    found = []
    for block, rows in enumerate(indices[2].split(block_m)):
        of_keys = [
            states[:, :, block].repeat_interleave(block_n, -1)[..., None, :num_keys] for states in (fully, partly)
        ]
        mask = of_keys[0] | (of_keys[1] & sees(indices[0], indices[1], rows, indices[3]))
        found.append(_ranges_of(mask, int(rows[0])))
    most = max(ranges.shape[-2] for ranges in found)
    return torch.cat([torch.nn.functional.pad(ranges, (0, 0, 0, most - ranges.shape[-2])) for ranges in found], dim=2)


def show(ranges: Tensor, num_keys: int, *, batch: int = 0, head: int = 0, width: int = 64) -> str:
    """Draws ranges ``[B, H, Sq, R, 2]`` as text, a line for each query and a character for each key: ``█`` is seen,
    ``·`` is not. If there are more than ``width`` keys or queries, a character shows a block of several keys and
    queries; ``▒`` means that some keys of the block are seen by some queries.
    """
    check_tensor("ranges", ranges)
    check_rank("ranges", ranges, "[B, H, Sq, R, 2]")
    mask = to_bool(ranges[batch, head].cpu(), num_keys)
    step = max(1, -(-max(*mask.shape) // check_int("width", width, minimum=1)))
    lines = []
    for rows in mask.split(step):
        blocks = [bool(block.all()) + bool(block.any()) for block in rows.split(step, dim=1)]
        lines.append("".join("·▒█"[state] for state in blocks))
    return "\n".join(lines)


def _ranges(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Stacks R pairs (begin, end) of tensors ``[…]`` to ranges ``[…, R, 2]``."""
    return torch.stack([torch.stack(pair, -1) for pair in pairs], -2)


def _expect_few(name: str, count: int, query: int, other: str) -> None:
    expect(
        count <= MOST_RANGES,
        name,
        f"at most {MOST_RANGES} ranges of visible keys per query",
        f"{count} for query {query}; pass {other} instead",
    )


def _dense_blocks(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Returns bool ``[B, H, row blocks, key blocks]``: whether ``indices`` list the key block for the row block."""
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    dense = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter(-1, torch.where(is_listed, indices, indices.shape[-1]).long(), True)[..., :-1]
