"""The arguments of context parallel attention: they are checked on all ranks and prepared before anything is sent."""

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
    """The arguments of the dense and of the packed call; query, key and value are ``[B, H, S, D]``."""

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
        """Returns query, key and value in the dtype of autocast, and the options of all blocks, without slopes.

        ``check`` covers what differs between the two calls. It either raises or returns by name the values that all
        ranks must share.
        """
        checked_on_all_ranks(groups, lambda: {**check(), **self._facts()})
        tensors = self.query, self.key, self.value
        cast = autocast_dtype(self.query.device.type)
        if cast is not None:  # before anything is sent: 16-bit messages are smaller
            tensors = tuple(autocast_to(cast, tensor) for tensor in tensors)  # type: ignore[assignment]
        left, right = self.window
        seed = self._common_seed(groups) if self.dropout_p > 0 else None
        window = (left, 0 if self.causal else right)
        return *tensors, BlockOptions(window, self.softcap, None, self.dropout_p, seed, self.scale, self.deterministic)

    def _facts(self) -> dict[str, Any]:
        slopes = self.alibi_slopes
        of_batch = slopes if slopes is None or slopes.dim() == 1 else None  # a row of slopes may be a document's
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
        """Returns the given seed, or else one that the first rank draws and broadcasts."""
        if self.dropout_seed is not None:
            return seed_tensor(self.dropout_seed, self.query.device)
        drawn = draw_seed(self.query.device)
        for group in groups:
            dist.broadcast(drawn, dist.get_global_rank(group, 0), group=group)
        return drawn


def split_groups(
    groups: Sequence[dist.ProcessGroup], strategy: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the group whose ranks exchange sequence for heads, and the group whose ranks hold different keys.

    Either may be None.
    """
    check_choice("strategy", strategy, STRATEGIES)
    expect(len(groups) < 3, "group", "a mesh of one or two dimensions", len(groups))
    if strategy == "ulysses":
        expect(len(groups) == 1, "group", "a mesh of one dimension for strategy 'ulysses'", len(groups))
        return groups[0], None
    return (groups[1], groups[0]) if len(groups) == 2 else (None, groups[0])


def check_heads(query: Tensor, key: Tensor, by_heads: dist.ProcessGroup | None) -> None:
    """Checks that the ranks that exchange sequence for heads divide the heads of query and key, ``[B, H, S, D]``."""
    num_ranks = 1 if by_heads is None else dist.get_world_size(by_heads)
    for name, tensor in (("query", query), ("key", key)):
        heads = tensor.shape[1]
        expect(heads % num_ranks == 0, name, f"heads that the {num_ranks} ranks that exchange them divide", heads)
