"""Provides a ``with`` block in which unchanged models attend over a sequence that is spread over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from fastattn.checks import expect
from fastattn.distributed.agreement import checked_on_all_ranks
from fastattn.distributed.arguments import split_groups
from fastattn.distributed.collectives import Group, process_groups
from fastattn.distributed.context_parallel import context_parallel_attention
from fastattn.distributed.sequence import parts_per_rank
from fastattn.errors import InputError
from fastattn.functional import spread_attention
from fastattn.patch import patch_sdpa


@contextlib.contextmanager
def context_parallel(group: Group = None, *, strategy: str = "allgather", layout: str = "contiguous") -> Iterator[None]:
    """Makes attention inside the block run over a sequence that is spread over ranks (``context_parallel_attention``).

    It covers every ``F.scaled_dot_product_attention``, and models of transformers with
    ``attn_implementation="fastattn"``. Pass the model this rank's parts of tokens and positions (``shard_sequence``).
    Call ``backward()`` inside the block too, because activation checkpointing calls attention again in the backward
    pass. The block applies to all threads of the process. Of nested blocks, the innermost applies.

    ``nn.MultiheadAttention`` is only covered with ``need_weights=False``. For packed sequences call
    ``context_parallel_attention_varlen``. Here they raise an error if positions restart inside one of a rank's parts.
    If positions restart only where a part begins, there is no error, and the results are wrong.

    Args:
        group, strategy, layout: as for ``context_parallel_attention``.

    Raises:
        InputError: a group that is not initialised. Inside the block, a call of attention raises it for a mask, a bias,
            padding, a cache that already holds tokens, and packed sequences. With ``FASTATTN_CHECK=1``, all ranks raise
            an error if one rank does. Otherwise the other ranks wait.
    """
    split_groups(process_groups(group), strategy)
    attention = _Attention(group, strategy, layout)
    with patch_sdpa():  # fastattn's function, instead of torch's, passes calls on to the innermost block
        spread_attention.enter(attention)
        try:
            yield
        finally:
            spread_attention.leave(attention)


class _Attention:
    def __init__(self, group: Group, strategy: str, layout: str) -> None:
        self.num_parts = parts_per_rank(layout)
        self._group = group
        self._options: dict[str, Any] = {"group": group, "strategy": strategy, "layout": layout}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return context_parallel_attention(query, key, value, **self._options, **options)

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes ``F.scaled_dot_product_attention`` for ``[..., H, L, E]``, with any number of batch dimensions."""
        try:
            came = "a mask; pass is_causal=True, or call context_parallel_attention with key_ranges"
            expect(attn_mask is None, "attn_mask", "None inside of context_parallel", came)
            expect(
                query.dim() > 3, "query", "[..., H, L, E] with a batch inside of context_parallel", list(query.shape)
            )
            heads = f"the query's {query.shape[-3]} heads, or enable_gqa=True"
            expect(enable_gqa or key.shape[-3] == query.shape[-3], "key", heads, key.shape[-3])
        except InputError as error:
            self.refuse(error)
        out = self(
            *(tensor.flatten(0, -4) for tensor in (query, key, value)),
            window=(-1, 0 if is_causal else -1),
            dropout_p=dropout_p,
            scale=scale,
        )
        return out.unflatten(0, query.shape[:-3])

    def refuse(self, error: InputError) -> NoReturn:
        def check() -> NoReturn:
            raise error

        checked_on_all_ranks(process_groups(self._group), check)
        raise AssertionError("a check that raises has passed")
