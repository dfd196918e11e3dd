"""Implements a paged key-value cache and its steps. Sequences take pages from one pool and can share pages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Never

from fastattn.cache.pages import PageDemand, PagePool, Reservation
from fastattn.cache.protocol import AttendOptions, StepCache
from fastattn.cache.storage import CacheLayout, LayerStorage
from fastattn.call import AttentionCall
from fastattn.checks import (
    check_bool,
    check_dtype,
    check_int,
    check_rank,
    check_shape,
    check_tensor,
    expect,
    numbers_below,
    refuse_keywords,
    type_name,
)
from fastattn.functional.attention import carry_out, prepare
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.functional.kv_cache_checks import check_rotary
from fastattn.rotary import rotary

NO_PAGE = -1  # pads rows of a block table; kernels treat it as no page


def _listed(argument: str, numbers: Any, expected: str) -> list[int]:
    """Returns ``numbers`` as a list. Raises for a single number and for a tensor."""
    expect(not isinstance(numbers, Integral), argument, expected, f"{numbers}; pass [{numbers}]")
    expect(not isinstance(numbers, Tensor), argument, expected, f"a torch.Tensor; pass {argument}.tolist()")
    try:
        return list(numbers)
    except TypeError:
        raise TypeError(f"{argument}: expected {expected}, got {type_name(numbers)}") from None


def _table_of(demand: PageDemand) -> Tensor:
    """Returns the block table, int32 ``[B, max_pages]`` on the CPU, that the sequences will have."""
    tables = demand.tables()
    width = max([1, *map(len, tables)])
    rows = [pages + [NO_PAGE] * (width - len(pages)) for pages in tables]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(rows), width)


class PagedKVCache:
    """Holds the keys and values of every layer in pages of ``page_size`` tokens (Kwon et al., "PagedAttention", 2023).

    ``add`` and ``fork`` make a sequence and return its number. A step appends tokens to some of the sequences. A step
    is a ``StepCache``, so a model takes a step instead of a ``KVCache``::

        cache = PagedKVCache(num_layers, num_pages, kv_heads, head_dim, page_size=16)
        first = cache.add()
        model(prompt, cache.step([first], num_new=len(prompt)))  # each layer calls step.attend(layer, ...)
        second = cache.fork(first)                               # shares the prompt's pages
        model(next_tokens, cache.step([first, second], num_new=1))
        cache.free(first)

    A chunk appends different numbers of tokens to the sequences, for example whole prompts or parts of prompts. A chunk
    is a ``StepCache`` too, and packs the tokens of all sequences in one row::

        chunk = cache.chunk([first, second], [300, 17])          # 300 tokens of the first prompt, 17 of the second
        model(tokens[None], chunk)                               # chunk.attend takes [1, heads, 317, head_dim]

    Tokens count once every layer has stored them. So a step that is abandoned half-way has no effect: the next step of
    the same sequences begins at the same position, and the abandoned step's pages become free. If some layers had
    stored the tokens of such a step, the cache warns once another step replaces it, or nobody holds it any more: with a
    model that has fewer layers than the cache, all lengths would stay 0.

    Sequences can share a page. The cache copies the page when one of these sequences is about to write to it. The host
    keeps the list of each sequence's pages; each step makes a block table and lengths from these lists. A call that
    raises an error, also ``CacheFull``, changes nothing.

    Args:
        num_layers, num_pages, kv_heads, head_dim: the number of each; every layer has ``num_pages`` pages.
        page_size: tokens per page.
        value_dim: the values' head dim, by default ``head_dim``.
        dtype, device: of the queries, keys and values; by default torch's defaults.
        quantized: store int8 (``True``, ``"int8"`` or ``torch.int8``) or fp8 (``"fp8"`` or ``torch.float8_e4m3fn``)
            with a float32 scale for each token and head of the keys and of the values.

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
        quantized: bool | str | torch.dtype = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_keywords(PagedKVCache, unknown)
        check_int("num_layers", num_layers, minimum=1)
        check_int("num_pages", num_pages, minimum=1)
        check_int("page_size", page_size, minimum=1)
        self.layout = CacheLayout.checked(kv_heads, head_dim, value_dim, dtype, device, quantized)
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self._layers = [LayerStorage.allocate(self.layout, num_pages, page_size) for _ in range(num_layers)]
        self._pool = PagePool(num_pages, page_size)

    @property
    def sequences(self) -> list[int]:
        """Returns the numbers of all sequences, oldest first."""
        return list(self._pool.sequences)

    @property
    def num_free_pages(self) -> int:
        """Returns the number of pages that no sequence holds and no step has reserved."""
        self._pool.settle()
        return len(self._pool.free_pages)

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes that the keys, values and scales take."""
        return sum(layer.nbytes for layer in self._layers)

    def length(self, sequence: int) -> int:
        """Returns the number of tokens that a sequence has in every layer."""
        return self._pool.find(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """Returns the numbers of the pages that hold a sequence's tokens, in order."""
        return list(self._pool.find(sequence).pages)

    def add(self) -> int:
        """Adds a sequence without tokens and returns its number, which is never used again."""
        return self._pool.add()

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Adds a sequence that shares the first ``length`` tokens of ``sequence``, by default all, and returns its
        number.

        An open step of ``sequence`` ends: tokens that not every layer has stored are lost. No page is copied until one
        of the sequences writes to it.
        """
        return self._pool.fork(sequence, length)

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its pages become free unless another sequence shares them."""
        self._pool.free(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets a sequence's tokens from ``length`` on, such as a prompt's padding or rejected tokens of a draft
        model."""
        self._pool.truncate(sequence, length)

    def reset(self) -> None:
        """Forgets every sequence."""
        for sequence in self.sequences:
            self.free(sequence)

    def step(self, sequences: Sequence[int], num_new: int) -> PagedStep:
        """Makes a step that appends ``num_new`` tokens to each of ``sequences``, and reserves pages for them.

        The step's ``attend`` stores the tokens of one layer; the tokens count once every layer has stored them. Earlier
        steps of these sequences can store nothing from now on, and the new step can take the pages that they reserved.

        Raises:
            CacheFull: the pool has too few free pages.
            InputError, TypeError: an argument is wrong. The cache is then unchanged.
        """
        names = _listed("sequences", sequences, "a list of sequences' numbers")
        if isinstance(num_new, (list, tuple)):
            came = f"{type_name(num_new)}; chunk() takes a number for each sequence"
            raise TypeError(f"num_new: expected an int, got {came}")
        num_new = check_int("num_new", num_new, minimum=0)
        demand = self._pool.demand(names, [num_new] * len(names))
        before = self._to_device([s.length for s in demand.sequences])
        return PagedStep(self, tuple(names), *self._reserve(demand, _table_of(demand)), num_new, before)

    def chunk(self, sequences: Sequence[int], num_new: Sequence[int]) -> PagedChunk:
        """Makes a step that appends ``num_new[i]`` tokens to ``sequences[i]``, and reserves pages for them.

        It is like ``step``, but the tokens of all sequences are packed one after the other.

        Raises:
            CacheFull: the pool has too few free pages.
            InputError, TypeError: an argument is wrong, or the cache is quantized. The cache is then unchanged.
        """
        unquantized = self.layout.quantized is None
        came = f"{self.layout.quantized}; use step(), or make the cache without quantized"
        expect(unquantized, "quantized", "False in a cache for chunk()", came)
        names = _listed("sequences", sequences, "a list of sequences' numbers")
        counts = _listed("num_new", num_new, "a list of numbers, one for each sequence")
        expect(len(counts) == len(names), "num_new", f"{len(names)} numbers, one for each sequence", counts)
        counts = [check_int("num_new", count, minimum=0) for count in counts]
        demand = self._pool.demand(names, counts)
        before = [s.length for s in demand.sequences]
        after = [first + count for first, count in zip(before, counts, strict=True)]
        # For each new token: its sequence's row of the block table, and its position.
        owner = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        shifts = [first - begin for first, begin in zip(before, accumulate(counts, initial=0), strict=False)]
        position = torch.arange(len(owner), device="cpu") + torch.tensor(shifts, dtype=torch.int64, device="cpu")[owner]
        table = _table_of(demand)
        page = table[owner, position // self.page_size]
        cu_seqlens_q, cu_seqlens_k = (self._to_device([0, *accumulate(lengths)]) for lengths in (counts, after))
        return PagedChunk(
            self,
            tuple(names),
            *self._reserve(demand, table),
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max(counts, default=0),
            max_seqlen_k=max(after, default=0),
            page=self._to_device(page),
            row=self._to_device(position % self.page_size),
            position=self._to_device(position),
            num_positions=max((end for end, count in zip(after, counts, strict=True) if count > 0), default=0),
        )

    def arguments(self, layer: int) -> dict[str, Any]:
        """Returns a layer's pages and scales as arguments of ``attention_with_kv_cache``."""
        check_int("layer", layer)
        expect(0 <= layer < self.num_layers, "layer", numbers_below(self.num_layers, "a layer"), layer)
        return self._layers[layer].arguments()

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's pages of keys and values for ``attention_varlen``, ``[num_pages, Hkv, page_size, D]``."""
        arguments = self.arguments(layer)
        return arguments["k_cache"], arguments["v_cache"]

    def _reserve(self, demand: PageDemand, table: Tensor) -> tuple[Tensor, Reservation]:
        """Reserves the pages of ``demand``, and returns its block table on the device, and the reservation.

        It first allocates and copies on the device, where memory can run out, and then changes the host's lists.
        """
        block_table = self._to_device(table)
        if demand.copies_take_reserved:
            self._pool.end_superseded(demand)
        if demand.copies:
            sources = self._to_device([copy.source for copy in demand.copies]).long()
            targets = self._to_device([copy.target for copy in demand.copies]).long()
            for layer in self._layers:
                layer.copy_blocks(sources, targets)
        return block_table, self._pool.reserve(demand, self.num_layers)

    def _to_device(self, numbers: list[int] | Tensor) -> Tensor:
        """Returns the numbers as int32 on the device, without waiting for the device.

        The source is pinned memory, which torch keeps until the copy is done.
        """
        tensor = torch.as_tensor(numbers, dtype=torch.int32, device="cpu")
        if self.layout.device.type == "cuda":
            return tensor.pin_memory().to(self.layout.device, non_blocking=True)
        return tensor.to(self.layout.device)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(num_layers={self.num_layers}, num_pages={self.num_pages} ({self.num_free_pages} free), "
            f"page_size={self.page_size}, {self.layout.describe()})"
        )


@dataclass(frozen=True, eq=False)
class _NewTokens(StepCache):
    """Defines what steps and chunks share: they hold new tokens of some sequences, and reserve pages for the tokens.

    The tokens count (``PagedKVCache.length``) once every layer has stored them; until then the sequences are unchanged.
    Layers may attend in any order. A layer that attends again overwrites its tokens. Once one of the sequences gets
    another step or is forked, truncated or freed, this step raises ``InputError``. If not every layer had stored the
    tokens by then, the tokens are lost and the reserved pages become free. The pages also become free when the step is
    garbage-collected.

    Attributes:
        cache: the cache that gets the tokens.
        sequences: the sequences that get tokens.
        block_table: int32 ``[B, max_pages]``, padded with -1.
    """

    _name: ClassVar[str]  # used in error messages

    cache: PagedKVCache
    sequences: tuple[int, ...]
    block_table: Tensor
    reservation: Reservation = field(repr=False)

    def __post_init__(self) -> None:
        self.reservation.holder = weakref.ref(self)

    def lengths(self) -> list[int]:
        """Returns the number of tokens that each sequence has in every layer, without reading from the device."""
        return [self.cache.length(sequence) for sequence in self.sequences]

    def commit(self) -> None:
        """Counts the tokens as stored in every layer. Call it after a replayed CUDA graph or your own kernel stored
        them."""
        self.reservation.check_current()
        self.reservation.stored[:] = [True] * self.cache.num_layers

    def cancel(self) -> None:
        """Frees the pages that are reserved for the tokens. Has no effect once the tokens count."""
        self.cache._pool.cancel(self.reservation)

    def _check_num_new(self, name: str, expected: int, came: int) -> None:
        advice = f"; pass num_new={came} to cache.step()" if self._name == "step" else ""
        expect(came == expected, name, f"{expected} new tokens, as the {self._name} was made for", f"{came}{advice}")


@dataclass(frozen=True, eq=False)
class PagedStep(_NewTokens):
    """Appends ``num_new`` tokens to each of its sequences, as a ``StepCache``; batch row ``i`` is ``sequences[i]``.

    Attributes:
        num_new: the number of tokens that each sequence gets.
        cache_seqlens: int32 ``[B]``, the lengths before this step.
    """

    _name = "step"

    num_new: int
    cache_seqlens: Tensor

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def positions(self, num_new: int) -> Tensor:
        self._check_num_new("num_new", self.num_new, num_new)
        return self.cache_seqlens.long()[:, None] + torch.arange(num_new, device=self.cache_seqlens.device)

    def _attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, return_lse: bool, options: AttendOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.reservation.check_current()
        arguments = self.cache.arguments(layer)
        self._check_num_new("k_new", self.num_new, self.cache.layout.check_new(self.batch, query, k_new, v_new))
        result = attention_with_kv_cache(
            query,
            cache_seqlens=self.cache_seqlens,
            block_table=self.block_table,
            k_new=k_new,
            v_new=v_new,
            return_lse=return_lse,
            **arguments,
            **options,
        )
        self.reservation.stored[layer] = True
        return result


@dataclass(frozen=True, eq=False)
class PagedChunk(_NewTokens):
    """Appends any number of tokens to each of its sequences, as a ``StepCache``; packs them one after the other.

    Its ``attend`` takes tensors ``[1, H, total_new, D]``, or ``[total_new, H, D]`` as ``attention_varlen`` does, and
    returns results in the same form. There is one query for each new token, at that token's position.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``, the offsets of the new tokens.
        cu_seqlens_k: int32 ``[B + 1]``, the offsets of all tokens of the sequences.
        max_seqlen_q, max_seqlen_k: the largest number of new tokens, and of all tokens, of any sequence.
        page, row: int32 ``[total_new]``, the page of each new token, and its row in the page.
        position: int32 ``[total_new]``, the position of each new token in its sequence.
        num_positions: one more than the largest ``position``.
    """

    _name = "chunk"

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page: Tensor
    row: Tensor
    position: Tensor
    num_positions: int

    @property
    def batch(self) -> int:
        """Returns 1: one row holds the tokens of all sequences."""
        return 1

    def positions(self, num_new: int) -> Tensor:
        """Returns the positions of the chunk's new tokens in their sequences, int64 ``[1, total_new]``."""
        self._check_num_new("num_new", len(self.position), num_new)
        return self.position.long()[None]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that ``attention_varlen`` needs besides the query and the pools."""
        names = ("block_table", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {name: getattr(self, name) for name in names}

    def store(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Writes the new tokens, ``[total_new, Hkv, D]`` and ``[total_new, Hkv, Dv]``, to the pages of a layer.

        ``attend`` is ``store``, and then ``attention_varlen(query, *cache.pools(layer), causal=True,
        **chunk.arguments())``. Unlike ``attend``, these two calls do not apply RoPE: rotate keys and queries first.
        """
        self.reservation.check_current()
        self._check_new(layer, k_new, v_new)
        self._write(layer, k_new, v_new)
        self.reservation.stored[layer] = True

    def _attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, return_lse: bool, options: AttendOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.reservation.check_current()
        check_tensor("query", query)
        is_row = query.dim() == 4
        query, k_new, v_new = (
            self._packed(name, tensor, is_row)
            for name, tensor in (("query", query), ("k_new", k_new), ("v_new", v_new))
        )
        self.cache.layout.check_query(query)
        cast = autocast_dtype(query.device.type)
        if cast is not None:
            query, k_new, v_new = (autocast_to(cast, tensor) for tensor in (query, k_new, v_new))
        num_splits = options.get("num_splits", 0)
        check_int("num_splits", num_splits)
        expect(num_splits == 0, "num_splits", "0 in a chunk, whose kernel decides it", f"{num_splits}; leave it out")
        tree_mask = options.get("tree_mask")
        expect(tree_mask is None, "tree_mask", "None in a chunk", "a tensor; use cache.step() for the tokens of a tree")
        self._check_new(layer, k_new, v_new)
        query, k_new = self._rotated(query, k_new, options)
        key, value = self.cache.pools(layer)
        call = AttentionCall(query, key, value, **self.arguments(), causal=True, return_lse=return_lse)
        own: dict[str, Any] = {name: value for name, value in options.items() if name in AttentionCall._fields}
        prepared = prepare(call._replace(**own))  # errors must be raised before tokens are stored
        self._write(layer, k_new, v_new)
        result: Any = carry_out(prepared)
        self.reservation.stored[layer] = True
        if not is_row:
            return result
        if isinstance(result, Tensor):
            return result.transpose(0, 1)[None]
        out, lse = result
        return out.transpose(0, 1)[None], lse[None]

    def _packed(self, name: str, tensor: Tensor, is_row: bool) -> Tensor:
        """Checks ``tensor`` and returns it as ``[total_new, H, D]``; it is ``[1, H, total_new, D]`` if ``is_row``."""
        check_tensor(name, tensor)
        check_rank(name, tensor, "[1, H, total_new, D]" if is_row else "[total_new, H, D]")
        if is_row:
            check_shape(name, tensor, (1, *tensor.shape[1:]), "[1, H, total_new, D]")
            tensor = tensor[0].transpose(0, 1)
        self._check_num_new(name, len(self.position), tensor.shape[0])
        return tensor

    def _check_new(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        for name, new, pool in zip(("k_new", "v_new"), (k_new, v_new), self.cache.pools(layer), strict=True):
            check_tensor(name, new)
            check_shape(name, new, (len(self.position), pool.shape[1], pool.shape[3]), "[total_new, Hkv, D]")
            check_dtype(name, new, (pool.dtype,))
            came = f'{new.device}; move it with {name}.to("{pool.device}")'
            expect(new.device == pool.device, name, f"a tensor on {pool.device}, as the cache is", came)
            needs_grad = torch.is_grad_enabled() and new.requires_grad
            came = "requires_grad=True; call it under torch.no_grad()"
            expect(not needs_grad, name, "a tensor that needs no gradient, since a cache keeps none", came)

    def _write(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        for new, pool in zip((k_new, v_new), self.cache.pools(layer), strict=True):
            pool[self.page.long(), :, self.row.long()] = new

    def _rotated(self, query: Tensor, k_new: Tensor, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """Returns query and new keys, rotated by their positions (RoPE) if the options have ``rotary_cos``."""
        cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
        interleaved = check_bool("rotary_interleaved", options.get("rotary_interleaved", False))
        check_rotary(cos, sin, self.cache.layout.head_dim)
        if cos is None or sin is None:
            return query, k_new
        expected = f"at least {self.num_positions} rows, one for each position"
        expect(cos.shape[0] >= self.num_positions, "rotary_cos", expected, cos.shape[0])
        position = self.position.long()
        angles = cos[position][None], sin[position][None]

        def turned(x: Tensor) -> Tensor:
            return rotary(x.transpose(0, 1)[None], *angles, interleaved)[0].transpose(0, 1)

        return turned(query), turned(k_new)
