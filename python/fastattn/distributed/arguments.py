"""What a call of context parallel attention is given: checked on all ranks before anything is sent, and made ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fastattn.checks import check_bool, check_choice, expect
from fastattn.distributed.agreement import checked_on_all_ranks
from fastattn.functional.attention_block import BlockOptions
from fastattn.functional.attention_checks import Options, check_call, check_window
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.dropout_seed import draw_seed, seed_tensor

STRATEGIES = ("ring", "allgather", "ulysses")


class Arguments(NamedTuple):
    """Of both calls; tensors ``[B, H, S, D]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    strategy: str
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    scale: float | None
    return_lse: bool
    deterministic: bool | None

    def prepared(
        self, groups: Sequence[dist.ProcessGroup], check: Callable[[], dict[str, Any]]
    ) -> tuple[Tensor, Tensor, Tensor, BlockOptions]:
        """Query, key and value in the dtype of autocast, and the options of all blocks, without slopes.

        ``check`` is about what the calls do not have in common. It raises, or returns what has to be the same on all
        ranks.
        """
        checked_on_all_ranks(groups, lambda: {**check(), **self._facts()})
        tensors = self.query, self.key, self.value
        cast = autocast_dtype(self.query.device.type)
        if cast is not None:  # before anything is sent
            tensors = tuple(autocast_to(cast, tensor) for tensor in tensors)  # type: ignore[assignment]
        left, right = self.window
        seed = self._common_seed(groups) if self.dropout_p > 0 else None
        window = (left, 0 if self.causal else right)
        return *tensors, BlockOptions(window, self.softcap, None, self.dropout_p, seed, self.scale, self.deterministic)

    def _facts(self) -> dict[str, Any]:
        slopes = self.alibi_slopes
        of_batch = slopes if slopes is None or slopes.dim() == 1 else None  # those of documents are no batch's
        check_call(
            (self.query, self.key, self.value, None, of_batch, self.sinks, None, None, None),
            Options(0, 0, self.causal, self.window, self.softcap, self.dropout_p, self.scale),
        )
        check_bool("return_lse", self.return_lse)
        if self.deterministic is not None:
            check_bool("deterministic", self.deterministic)
        if isinstance(self.dropout_seed, int):
            seed_tensor(self.dropout_seed, self.query.device)
        tensors = {name: getattr(self, name) for name in ("query", "key", "value", "alibi_slopes", "sinks")}
        return {
            **{name: None if t is None else (list(t.shape), str(t.dtype)) for name, t in tensors.items()},
            "strategy": self.strategy,
            "causal": self.causal,
            "window": check_window(self.window),
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "dropout_seed": self.dropout_seed if isinstance(self.dropout_seed, int) else self.dropout_seed is None,
            "scale": self.scale,
        }

    def _common_seed(self, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        """Where none is given, that of the first rank."""
        if self.dropout_seed is not None:
            return seed_tensor(self.dropout_seed, self.query.device)
        drawn = draw_seed(self.query.device)
        for group in groups:
            dist.broadcast(drawn, dist.get_global_rank(group, 0), group=group)
        return drawn


def split_groups(
    groups: Sequence[dist.ProcessGroup], strategy: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group whose ranks exchange sequence for heads, and the one whose ranks have different keys."""
    check_choice("strategy", strategy, STRATEGIES)
    expect(len(groups) < 3, "group", "a mesh of one or two dimensions", len(groups))
    if strategy == "ulysses":
        expect(len(groups) == 1, "group", "a mesh of one dimension for strategy 'ulysses'", len(groups))
        return groups[0], None
    return (groups[1], groups[0]) if len(groups) == 2 else (None, groups[0])


def check_heads(query: Tensor, key: Tensor, by_heads: dist.ProcessGroup | None) -> None:
    """Of ``[B, H, S, D]``: ranks that exchange sequence for heads have as many each."""
    num_ranks = 1 if by_heads is None else dist.get_world_size(by_heads)
    for name, tensor in (("query", query), ("key", key)):
        heads = tensor.shape[1]
        expect(heads % num_ranks == 0, name, f"heads that the {num_ranks} ranks that exchange them divide", heads)
