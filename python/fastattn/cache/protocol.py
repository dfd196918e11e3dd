"""Defines the interface through which a model's layers use any key-value cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, overload

from torch import Tensor
from typing_extensions import Unpack  # in typing from Python 3.11 on

from fastattn.checks import advice_on_keyword
from fastattn.functional.attention import No, Yes
from fastattn.functional.kv_cache_attention import AttendOptions

_OPTIONS = frozenset((*AttendOptions.__annotations__, "return_lse"))
_SET_BY_THE_CACHE = frozenset(
    ("k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "block_table", "key", "value")
    + ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
)


_Lse = TypeVar("_Lse")


class _Options(AttendOptions, Generic[_Lse], total=False):
    return_lse: _Lse


class StepCache(ABC):
    """Defines the interface of a cache during one step: a ``KVCache``, or a step or chunk of a ``PagedKVCache``.

    A model that calls only the methods of this class works with all three, and with every dtype of the cache::

        def forward(self, x: Tensor, layer: int, cache: StepCache) -> Tensor:
            query, key, value = self.project(x)  # [batch, heads, new tokens, head_dim] each
            out = cache.attend(layer, query, key, value, rotary_cos=self.cos, rotary_sin=self.sin)
            return self.out(out.transpose(1, 2).flatten(2))

        model(tokens, cache)                          # a KVCache
        model(tokens, paged.step(sequences, num_new=1))
        model(packed[None], paged.chunk(sequences, num_new=[300, 17]))
    """

    @property
    @abstractmethod
    def batch(self) -> int:
        """Returns the number of rows that ``attend`` takes: one per sequence, or 1 for a chunk, which packs all
        sequences in one row."""

    @abstractmethod
    def lengths(self) -> list[int]:
        """Returns the number of tokens that each sequence has in every layer."""

    @abstractmethod
    def positions(self, num_new: int) -> Tensor:
        """Returns the positions of the next new tokens in their sequences, int64 ``[batch, num_new]``.

        Call it before the last layer attends, because the positions change then.
        """

    @overload
    def attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, **options: Unpack[_Options[No]]
    ) -> Tensor: ...
    @overload
    def attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, **options: Unpack[_Options[Yes]]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, **options: Unpack[_Options[bool]]
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[AttendOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Appends ``k_new`` and ``v_new`` to a layer of the cache, then computes attention over all tokens of that
        layer.

        Args:
            layer: the number of the layer, from 0.
            query: ``[batch, Hq, Sq, head_dim]``; query ``i`` has the position ``total - Sq + i``, where total counts
                the new tokens too.
            k_new: ``[batch, kv_heads, S_new, head_dim]``.
            v_new: ``[batch, kv_heads, S_new, value_dim]``.
            return_lse: also return the natural log of each row's softmax denominator, ``[batch, Hq, Sq]``.
            options: the arguments of ``attention_with_kv_cache`` that ``AttendOptions`` lists.

        Returns:
            The output, ``[batch, Hq, Sq, value_dim]``, or with ``return_lse`` a tuple of the output and the lse.

        Raises:
            CacheFull: the new tokens do not fit.
            InputError, TypeError: an argument is wrong. The cache is then unchanged.
        """
        for name in options:
            if name in _SET_BY_THE_CACHE:
                raise TypeError(f"{name}: {type(self).__name__}.attend passes it itself; leave it out")
            if name not in _OPTIONS:
                advice = advice_on_keyword(name, _OPTIONS) or f"; it takes {', '.join(sorted(_OPTIONS))}"
                raise TypeError(f"{name}: {type(self).__name__}.attend takes no such argument{advice}")
        return self._attend(layer, query, k_new, v_new, return_lse, options)

    @abstractmethod
    def _attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, return_lse: bool, options: AttendOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Does the work of ``attend``, after the names of the options have been checked."""
