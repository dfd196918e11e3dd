"""Checks the arguments of context parallel attention on all ranks, and prepares them before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.checks import check_choice, expect
from fastattn.dispatch.thread_state import asked
from fastattn.distributed.agreement import checked_on_all_ranks
from fastattn.distributed.local_attention import Inputs, LocalAttention
from fastattn.functional.attention_checks import check_call, check_window
from fastattn.functional.autocast import autocast_dtype, autocast_to
from fastattn.functional.dropout_seed import draw_seed, seed_tensor

STRATEGIES = ("ring", "allgather", "ulysses")


def prepared(
    call: AttentionCall, strategy: str, groups: Sequence[dist.ProcessGroup], check: Callable[[], dict[str, Any]]
) -> tuple[Inputs, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Checks a call with tensors ``[B, H, S, D]`` on all ranks. Returns its inputs and the groups of ``split_groups``.

    If autocast is on, the returned query, key and value have autocast's dtype. The dropout seed is the same on all
    ranks. ``check`` does the checks that only the dense call or only the packed call needs. It raises an error, or
    returns a dict of the values that must be equal on all ranks.
    """

    def check_all() -> tuple[AttentionCall, dict[str, Any]]:
        by_heads, _ = split_groups(groups, strategy)
        shared = check()
        _check_heads(call, by_heads)
        return _checked(call), {**shared, "strategy": strategy, **_facts(call)}

    checked = checked_on_all_ranks(groups, check_all)
    cast = autocast_dtype(call.query.device.type)
    if cast is not None:  # before anything is sent: 16-bit messages are smaller
        checked = checked.with_tensors(tuple(autocast_to(cast, tensor) for tensor in checked[:3]))
    checked = checked._replace(dropout_seed=_common_seed(call, groups) if call.dropout_p > 0 else None)
    options = checked.without_tensors()._replace(key_ranges=checked.key_ranges)
    attention = LocalAttention(options, 0, call.query.shape[1], asked())
    return Inputs(*checked[:3], call.alibi_slopes, call.sinks, attention), *split_groups(groups, strategy)


def _checked(call: AttentionCall) -> AttentionCall:
    slopes = call.alibi_slopes
    if isinstance(call.dropout_seed, int):
        seed_tensor(call.dropout_seed, call.query.device)
    # Slopes ``[B, Hq]`` are left out, because ``check_call`` would compare B with the batch, but in a packed call B is
    # the number of documents. The caller has checked these slopes.
    checked, _ = check_call(call._replace(alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else None))
    return checked._replace(alibi_slopes=slopes)


def _facts(call: AttentionCall) -> dict[str, Any]:
    """Returns a dict of the shapes, dtypes and options that must be equal on all ranks."""
    names = ("query", "key", "value", "alibi_slopes", "sinks", "key_ranges")
    tensors = {name: getattr(call, name) for name in names}
    seed = call.dropout_seed
    return {
        **{name: None if t is None else (list(t.shape), str(t.dtype)) for name, t in tensors.items()},
        **{name: getattr(call, name) for name in ("causal", "softcap", "dropout_p", "scale")},
        "window": check_window(call.window),
        "dropout_seed": seed if isinstance(seed, int) else seed is None,
    }


def _common_seed(call: AttentionCall, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns the given seed as a tensor. If there is none, the first rank draws a seed and broadcasts it."""
    if call.dropout_seed is not None:
        return seed_tensor(call.dropout_seed, call.query.device)
    drawn = draw_seed(call.query.device)
    for group in groups:
        dist.broadcast(drawn, dist.get_global_rank(group, 0), group=group)
    return drawn


def split_groups(
    groups: Sequence[dist.ProcessGroup], strategy: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the group whose ranks exchange rows for heads, and the group whose ranks attend to each other's keys.

    A group is None if no ranks do so.
    """
    check_choice("strategy", strategy, STRATEGIES)
    expect(len(groups) < 3, "group", "a mesh of one or two dimensions", len(groups))
    if strategy == "ulysses":
        expect(len(groups) == 1, "group", "a mesh of one dimension for strategy 'ulysses'", len(groups))
        return groups[0], None
    return (groups[1], groups[0]) if len(groups) == 2 else (None, groups[0])


def _check_heads(call: AttentionCall, by_heads: dist.ProcessGroup | None) -> None:
    """Checks that the number of ranks in ``by_heads`` divides the heads of query and of key."""
    num_ranks = 1 if by_heads is None else dist.get_world_size(by_heads)
    for name, tensor in (("query", call.query), ("key", call.key)):
        heads = tensor.shape[1]
        expected = f"heads that are a multiple of {num_ranks}, the number of ranks that exchange rows for heads"
        expect(heads % num_ranks == 0, name, expected, f"{heads}; pass strategy='ring', and no mesh of two dimensions")
