"""Holds the attention with which ``fastattn.distributed.context_parallel`` replaces the attention of models."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from torch import Tensor

from fastattn.errors import InputError


class SpreadAttention(Protocol):
    """Computes attention over a sequence that is sharded over ranks. All layers of a model use the same object."""

    num_parts: int  # the number of separate ranges of the sequence in a rank's shard

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...

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
        """Replaces ``F.scaled_dot_product_attention``."""

    def refuse(self, error: InputError) -> NoReturn:
        """Raises ``error`` instead of computing. With ``FASTATTN_CHECK=1``, the other ranks' calls raise an error
        too."""


_in_force: list[SpreadAttention] = []


def in_force() -> SpreadAttention | None:
    """Returns the attention of the innermost ``context_parallel`` block, or None outside of all blocks."""
    return _in_force[-1] if _in_force else None


def enter(attention: SpreadAttention) -> None:
    _in_force.append(attention)


def leave(attention: SpreadAttention) -> None:
    """Removes ``attention``, which is not always the innermost, because other threads can have entered blocks since."""
    del _in_force[max(i for i, entered in enumerate(_in_force) if entered is attention)]
