"""The new tokens of some sequences of a ``PagedKVCache``, which its ``step`` and ``chunk`` return."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn.cache.pages import Reservation
from fastattn.cache.protocol import AttendOptions, StepCache
from fastattn.call import AttentionCall
from fastattn.checks import (
    FLOATING,
    check_bool,
    check_dtype,
    check_int,
    check_rank,
    check_shape,
    check_tensor,
    expect,
)
from fastattn.errors import InputError
from fastattn.functional.attention import carry_out, prepare
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.rotary import rotary

if TYPE_CHECKING:
    from fastattn.cache.paged import PagedKVCache


@dataclass(frozen=True, eq=False)
class _NewTokens(StepCache):
    """The common base of steps and chunks.

    The tokens count (``PagedKVCache.length``) once every layer has stored them; until then the sequences are unchanged.
    Layers may attend in any order, and more than once: a layer then writes its tokens again. As soon as one of the
    sequences gets another step or is forked, truncated or freed, this step is refused with ``InputError``, and its
    tokens that do not count yet never will. Its reserved pages are then free again. They are also freed when nobody
    holds the step any more.

    Attributes:
        cache: the cache of which this is a step.
        sequences: the sequences that get tokens.
        block_table: int32 ``[B, max_pages]``, filled up with -1.
    """

    cache: PagedKVCache
    sequences: tuple[int, ...]
    block_table: Tensor
    reservation: Reservation = field(repr=False)

    def __post_init__(self) -> None:
        self.reservation.holder = weakref.ref(self)

    def lengths(self) -> list[int]:
        """Returns the number of tokens that each sequence has in every layer, which the host knows."""
        return [self.cache.length(sequence) for sequence in self.sequences]

    def commit(self) -> None:
        """Counts the tokens now, for a replayed CUDA graph or a kernel of your own that has stored them."""
        self.reservation.check_current()
        self.reservation.mark_all_stored()

    def cancel(self) -> None:
        """Frees the pages that are reserved for the tokens; it has no effect once the tokens count."""
        self.cache._pool.cancel(self.reservation)

    def _check_num_new(self, name: str, expected: int, came: int) -> None:
        kind = "chunk" if isinstance(self, PagedChunk) else "step"
        expect(came == expected, name, f"the {kind}'s {expected} new tokens", came)


@dataclass(frozen=True, eq=False)
class PagedStep(_NewTokens):
    """A step that gives each of its sequences ``num_new`` tokens; batch row ``i`` is ``sequences[i]``.

    Attributes:
        num_new: the number of tokens that each sequence gets.
        cache_seqlens: int32 ``[B]``, the lengths before this step.
    """

    num_new: int
    cache_seqlens: Tensor

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def positions(self, num_new: int) -> Tensor:
        """Returns the positions of the step's new tokens in their sequences, int64 ``[batch, num_new]``."""
        self._check_num_new("num_new", self.num_new, num_new)
        return self.cache_seqlens.long()[:, None] + torch.arange(num_new, device=self.cache_seqlens.device)

    def _attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, return_lse: bool, options: AttendOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.reservation.check_current()
        arguments = self.cache.arguments(layer)
        check_tensor("query", query)
        check_tensor("k_new", k_new)
        check_tensor("v_new", v_new)
        check_shape("query", query, (self.batch, *query.shape[1:]), "[batch, Hq, Sq, D]")
        check_rank("k_new", k_new, "[B, Hkv, S_new, D]")
        self._check_num_new("k_new", self.num_new, k_new.shape[2])
        self.cache.layout.check_query(query)
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
    """A step that gives each of its sequences any number of tokens, packed one sequence after the other.

    Its ``attend`` takes the tokens as one row, ``[1, H, total_new, D]``, or as ``attention_varlen`` does, ``[total_new,
    H, D]``, and returns results in the same form. There is one query for each new token, at the same position.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``, the offsets of the new tokens.
        cu_seqlens_k: int32 ``[B + 1]``, the offsets of all tokens of the sequences.
        max_seqlen_q, max_seqlen_k: the largest numbers of new tokens and of all tokens of a sequence.
        page, row: int32 ``[total_new]``, the page of each new token, and its row in the page.
        position: int32 ``[total_new]``, the position of each new token in its sequence.
        num_positions: one more than the largest ``position``.
    """

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
        """The number of rows, which is 1: one row holds the tokens of all sequences."""
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

        This is the first half of ``attend``; the other is ``attention_varlen(query, *cache.pools(layer), causal=True,
        **chunk.arguments())``.
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
        expect(num_splits == 0, "num_splits", "0, as the kernel decides how to share the keys of a chunk", num_splits)
        tree_mask = options.get("tree_mask")
        expect(tree_mask is None, "tree_mask", "None in a chunk: the tokens of a tree are a step's", "a tensor")
        self._check_new(layer, k_new, v_new)
        query, k_new = self._rotated(query, k_new, options)
        key, value = self.cache.pools(layer)
        call = AttentionCall(query, key, value, **self.arguments(), causal=True, return_lse=return_lse)
        own: dict[str, Any] = {name: value for name, value in options.items() if name in AttentionCall._fields}
        call = call._replace(**own)
        prepared = prepare(call)  # it raises what is wrong before anything is stored
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
        """Returns ``[total_new, H, D]``, whichever of the two forms ``tensor`` has."""
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
            expect(new.device == pool.device, name, f"a tensor on {pool.device}, as the cache is", new.device)
            needs_grad = torch.is_grad_enabled() and new.requires_grad
            expect(not needs_grad, name, "a tensor that needs no gradient: a cache keeps none", "requires_grad=True")

    def _write(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        for new, pool in zip((k_new, v_new), self.cache.pools(layer), strict=True):
            pool[self.page.long(), :, self.row.long()] = new

    def _rotated(self, query: Tensor, k_new: Tensor, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """Returns query and new keys, rotated by their positions (RoPE) if the options ask for it."""
        cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
        interleaved = options.get("rotary_interleaved", False)
        check_bool("rotary_interleaved", interleaved)
        if cos is None and sin is None:
            return query, k_new
        check_tensor("rotary_cos", cos, optional=True)
        check_tensor("rotary_sin", sin, optional=True)
        if cos is None or sin is None:
            missing, other = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
            raise InputError(f"{missing}: expected a tensor, as {other} is one, got None")
        check_rank("rotary_cos", cos, "[positions, rotary_dim / 2]")
        check_dtype("rotary_cos", cos, FLOATING)
        check_dtype("rotary_sin", sin, (cos.dtype,))
        check_shape("rotary_sin", sin, cos.shape, "of rotary_cos")
        half = self.cache.layout.head_dim // 2
        expect(cos.shape[1] <= half, "rotary_cos", f"rotary_dim / 2 <= {half}, half the head dim", cos.shape[1])
        expect(cos.shape[0] >= self.num_positions, "rotary_cos", f"{self.num_positions} positions", cos.shape[0])
        position = self.position.long()
        angles = cos[position][None], sin[position][None]

        def turned(x: Tensor) -> Tensor:
            return rotary(x.transpose(0, 1)[None], *angles, interleaved)[0].transpose(0, 1)

        return turned(query), turned(k_new)
