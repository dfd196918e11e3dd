"""A key-value cache in pages, which sequences of any length take from one pool and can share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastattn.cache.storage import CacheLayout, LayerStorage
from fastattn.checks import check_dtype, check_int, check_rank, check_shape, check_tensor, expect
from fastattn.errors import CacheFull, InputError
from fastattn.functional.attention import attention_varlen
from fastattn.functional.kv_cache_attention import attention_with_kv_cache

NO_PAGE = -1  # what fills a block table beyond a sequence's pages: the kernels take it as absent


@dataclass
class _Sequence:
    """``pages``: the pages that hold its ``length`` tokens, in order, the last of them maybe not full."""

    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedKVCache:
    """Keys and values of every layer in pages of ``page_size`` tokens (Kwon et al., "PagedAttention", 2023).

    Sequences come and go one by one and are named by the numbers that ``add`` and ``fork`` return. A step appends to
    some of them; it has the ``attend`` of a ``KVCache``, so that a decoder takes either::

        cache = PagedKVCache(num_layers, num_pages, kv_heads, head_dim, page_size=16)
        first = cache.add()
        model(prompt, cache.step([first], num_new=len(prompt)))  # each layer calls step.attend(layer, ...)
        second = cache.fork(first)                               # shares the prompt's pages
        model(next_tokens, cache.step([first, second], num_new=1))
        cache.free(first)

    Prompts of different lengths are taken in together, and part by part. Such a chunk is packed, and attended to by
    ``attention_varlen``::

        chunk = cache.chunk([first, second], [300, 17])          # so many tokens of each prompt
        out = chunk.attend(layer, query, k, v)                   # [317, heads, head_dim] each, rotated if need be

    ``chunk.store(layer, k, v)`` is the first half of that; the other is ``attention_varlen(query, *cache.pools(layer),
    causal=True, **chunk.arguments())``.

    A page is shared by as many sequences as it has references, and is copied when one of them is about to write to it.
    Lists on the host are the truth about which page is whose; each step makes a block table and lengths from them.
    What a sequence is asked to hold beyond the pool raises ``CacheFull`` and changes nothing.

    Args:
        num_layers, num_pages, kv_heads, head_dim: the number of each; every layer has ``num_pages`` pages.
        page_size: tokens per page.
        value_dim: the values' head dim, by default ``head_dim``.
        dtype, device: of the queries, keys and values; by default torch's defaults.
        quantized: store int8 with one float32 scale per token and head.

    Raises:
        InputError, TypeError: an argument is wrong.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        quantized: bool = False,
    ) -> None:
        check_int("num_layers", num_layers, minimum=1)
        check_int("num_pages", num_pages, minimum=1)
        check_int("page_size", page_size, minimum=1)
        self.layout = CacheLayout.checked(kv_heads, head_dim, value_dim, dtype, device, quantized)
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self._layers = [LayerStorage.allocate(self.layout, num_pages, page_size) for _ in range(num_layers)]
        self._sequences: dict[int, _Sequence] = {}
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page that was freed last is taken first
        self._next_name = 0

    @property
    def sequences(self) -> list[int]:
        """The sequences that there are, oldest first."""
        return list(self._sequences)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """The memory that the pool takes, in bytes."""
        return sum(layer.nbytes for layer in self._layers)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._find(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in order."""
        return list(self._find(sequence).pages)

    def add(self) -> int:
        """A new sequence without tokens. Returns its number, which is never used again."""
        return self._name(_Sequence())

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that shares the first ``length`` tokens of another, by default all. Copies nothing yet."""
        parent = self._find(sequence)
        length = parent.length if length is None else length
        check_int("length", length, minimum=0)
        expect(length <= parent.length, "length", f"at most the {parent.length} tokens of sequence {sequence}", length)
        pages = parent.pages[: self._pages_for(length)]
        for page in pages:
            self._references[page] += 1
        return self._name(_Sequence(length, pages))

    def free(self, sequence: int) -> None:
        """Forget a sequence; the pages that nobody else shares are free again."""
        self.truncate(sequence, 0)
        del self._sequences[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget a sequence's tokens from ``length`` on: a prompt's padding, or what a draft model proposed in vain."""
        found = self._find(sequence)
        check_int("length", length, minimum=0)
        expect(length <= found.length, "length", f"at most the {found.length} tokens of sequence {sequence}", length)
        kept = self._pages_for(length)
        for page in reversed(found.pages[kept:]):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
        del found.pages[kept:]
        found.length = length

    def reset(self) -> None:
        """Forget every sequence."""
        for sequence in self.sequences:
            self.free(sequence)

    def step(self, sequences: Sequence[int], num_new: int) -> PagedStep:
        """Make room for ``num_new`` more tokens of each of ``sequences``, the batch of one step.

        The sequences count the tokens from now on; the step's ``attend`` stores them, layer by layer.

        Raises:
            CacheFull: the pool has too few free pages. InputError, TypeError: an argument is wrong. Nothing has
                changed then.
        """
        found = [self._find(sequence) for sequence in sequences]
        check_int("num_new", num_new, minimum=0)
        before = self._grow(sequences, [num_new] * len(found))
        return PagedStep(self, num_new, self._block_table(found), self._to_device(before))

    def chunk(self, sequences: Sequence[int], num_new: Sequence[int]) -> PagedChunk:
        """Make room for more tokens, ``num_new[i]`` of ``sequences[i]``: a part of each one's prompt, for instance.

        Like ``step``, with the tokens of all sequences packed one after the other.

        Raises:
            CacheFull: the pool has too few free pages. InputError, TypeError: an argument is wrong, or the cache is
                quantized. Nothing has changed then.
        """
        expect(not self.layout.quantized, "quantized", "False for chunks: their attention takes no int8 pages", True)
        found = [self._find(sequence) for sequence in sequences]
        expect(len(num_new) == len(found), "num_new", f"one number for each of {len(found)} sequences", len(num_new))
        for count in num_new:
            check_int("num_new", count, minimum=0)
        before = self._grow(sequences, list(num_new))
        tokens = [(s, at) for s, first in zip(found, before, strict=True) for at in range(first, s.length)]
        return PagedChunk(
            cache=self,
            block_table=self._block_table(found),
            cu_seqlens_q=self._to_device([0, *accumulate(num_new)]),
            cu_seqlens_k=self._to_device([0, *accumulate(s.length for s in found)]),
            max_seqlen_q=max(num_new, default=0),
            max_seqlen_k=max((s.length for s in found), default=0),
            page=self._to_device([s.pages[at // self.page_size] for s, at in tokens]),
            row=self._to_device([at % self.page_size for _, at in tokens]),
        )

    def _grow(self, sequences: Sequence[int], num_new: list[int]) -> list[int]:
        """Let the sequences have so many more tokens each, and pages for them; their lengths before."""
        found = [self._find(sequence) for sequence in sequences]
        expect(len(set(sequences)) == len(found), "sequences", "each sequence once", list(sequences))
        copies = self._pages_to_copy([s for s, count in zip(found, num_new, strict=True) if count])
        additional = [self._pages_for(s.length + n) - len(s.pages) for s, n in zip(found, num_new, strict=True)]
        needed = len(copies) + sum(additional)
        if needed > len(self._free):
            raise CacheFull(
                f"PagedKVCache: {len(found)} sequences need {needed} more pages of {self.page_size} tokens, and "
                f"{len(self._free)} of {self.num_pages} are free; free or truncate a sequence"
            )
        self._copy_on_write(copies)
        before = [s.length for s in found]
        for s, count, tokens in zip(found, additional, num_new, strict=True):
            s.pages += [self._take_page() for _ in range(count)]
            s.length += tokens
        return before

    def arguments(self, layer: int) -> dict[str, Any]:
        """A layer's pool, as ``attention_with_kv_cache`` takes it."""
        check_int("layer", layer)
        expect(0 <= layer < self.num_layers, "layer", f"a number from 0 to {self.num_layers - 1}", layer)
        return self._layers[layer].arguments()

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's pages of keys and of values, ``[num_pages, Hkv, page_size, D]``: for ``attention_varlen``."""
        arguments = self.arguments(layer)
        return arguments["k_cache"], arguments["v_cache"]

    def _find(self, sequence: int) -> _Sequence:
        check_int("sequence", sequence)
        found = self._sequences.get(sequence)
        if found is None:
            raise InputError(f"sequence: expected one of {self.sequences}, got {sequence}")
        return found

    def _name(self, sequence: _Sequence) -> int:
        name, self._next_name = self._next_name, self._next_name + 1
        self._sequences[name] = sequence
        return name

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take_page(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _pages_to_copy(self, sequences: list[_Sequence]) -> list[_Sequence]:
        """The sequences whose last page is not full and also somebody else's; the last writer of a page keeps it."""
        leaving: dict[int, int] = {}
        copies = []
        for sequence in sequences:
            if sequence.length % self.page_size:
                page = sequence.pages[-1]
                if self._references[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    copies.append(sequence)
        return copies

    def _copy_on_write(self, sequences: list[_Sequence]) -> None:
        if not sequences:
            return
        shared = [sequence.pages[-1] for sequence in sequences]
        own = [self._take_page() for _ in sequences]
        sources, targets = self._to_device(shared).long(), self._to_device(own).long()
        for layer in self._layers:
            layer.copy_blocks(sources, targets)
        for sequence, page, copy in zip(sequences, shared, own, strict=True):
            self._references[page] -= 1
            sequence.pages[-1] = copy

    def _block_table(self, sequences: list[_Sequence]) -> Tensor:
        """int32 ``[B, max_pages]``, at least one page wide."""
        width = max([len(s.pages) for s in sequences] + [1])
        rows = [s.pages + [NO_PAGE] * (width - len(s.pages)) for s in sequences]
        return self._to_device(rows).view(len(rows), width)

    def _to_device(self, numbers: list[Any]) -> Tensor:
        """int32, without waiting for the device: from pinned memory, which torch keeps until the copy is done."""
        tensor = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        if self.layout.device.type == "cuda":
            return tensor.pin_memory().to(self.layout.device, non_blocking=True)
        return tensor.to(self.layout.device)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(num_layers={self.num_layers}, num_pages={self.num_pages} ({self.num_free_pages} free), "
            f"page_size={self.page_size}, {self.layout.describe()})"
        )


@dataclass(frozen=True)
class PagedStep:
    """One step of some sequences of a ``PagedKVCache``: good until any of them is changed in another way.

    Attributes:
        cache: whose step it is.
        num_new: the tokens that each sequence gets.
        block_table: int32 ``[B, max_pages]``, filled up with -1.
        cache_seqlens: int32 ``[B]``, the lengths before this step.
    """

    cache: PagedKVCache
    num_new: int
    block_table: Tensor
    cache_seqlens: Tensor

    def attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As ``KVCache.attend``; batch row ``i`` is the step's sequence ``i``."""
        check_tensor("k_new", k_new)
        check_rank("k_new", k_new, "[B, Hkv, S_new, D]")
        expect(k_new.shape[2] == self.num_new, "k_new", f"the step's {self.num_new} new tokens", k_new.shape[2])
        return attention_with_kv_cache(
            query,
            cache_seqlens=self.cache_seqlens,
            block_table=self.block_table,
            k_new=k_new,
            v_new=v_new,
            **self.cache.arguments(layer),
            **options,
        )


@dataclass(frozen=True)
class PagedChunk:
    """New tokens of some sequences of a ``PagedKVCache``, packed: good until any of them is changed in another way.

    Attributes:
        cache: whose chunk it is.
        block_table: int32 ``[B, max_pages]``, filled up with -1.
        cu_seqlens_q: int32 ``[B + 1]``, offsets of the new tokens; cu_seqlens_k: of all tokens of the sequences.
        max_seqlen_q, max_seqlen_k: the largest numbers of each.
        page, row: int32 ``[total_new]``, where each new token lies.
    """

    cache: PagedKVCache
    block_table: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page: Tensor
    row: Tensor

    def arguments(self) -> dict[str, Any]:
        """What ``attention_varlen`` needs besides the query and the pools."""
        names = ("block_table", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {name: getattr(self, name) for name in names}

    def store(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Write the new tokens, ``[total_new, Hkv, D]`` and ``[total_new, Hkv, Dv]``, to the pages of a layer."""
        for name, new, pool in zip(("k_new", "v_new"), (k_new, v_new), self.cache.pools(layer), strict=True):
            check_tensor(name, new)
            check_shape(name, new, (len(self.page), pool.shape[1], pool.shape[3]), "[total_new, Hkv, D]")
            check_dtype(name, new, (pool.dtype,))
            needs_grad = torch.is_grad_enabled() and new.requires_grad
            expect(not needs_grad, name, "a tensor that needs no gradient: a cache keeps none", "requires_grad=True")
            pool[self.page.long(), :, self.row.long()] = new

    def attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, *, causal: bool = True, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Store the new tokens, then attend to all tokens of their sequences: ``attention_varlen`` with its options.

        ``query [total_new, Hq, D]`` stands where the new tokens do.
        """
        self.store(layer, k_new, v_new)
        key, value = self.cache.pools(layer)
        return attention_varlen(query, key, value, causal=causal, **self.arguments(), **options)
