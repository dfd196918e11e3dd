"""DTensor as ``attention`` takes it: batch entries and heads do not know of each other, so each rank attends over its
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastattn.checks import is_distributed
from fastattn.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_BATCH_AND_HEADS = (0, 1)


def attend_locally(
    tensors: tuple[Any, ...], is_sharded_by_heads_allowed: bool, attend: Callable[[tuple[Any, ...]], Any]
) -> Any:
    """``attend`` over what each rank has; the result, a tensor or several, is laid out over the ranks as the query is.

    Args:
        tensors: query, key and value, DTensor all, then what else the call has: plain tensors, the same on each rank,
            or DTensor.
        is_sharded_by_heads_allowed: False gives each rank all batch entries and heads, since the call has options that
            count them. So does a layout in which query, key and value differ, or that splits anything else.

    Raises:
        InputError: one of the first three is no DTensor, or they are on several meshes.
    """
    from torch.distributed.tensor import DTensor

    for name, tensor in zip(("query", "key", "value"), tensors, strict=False):
        if not is_distributed(tensor):
            raise InputError(
                f"{name}: expected a DTensor, as another of query, key and value is one, got {type(tensor).__name__}"
            )
        if tensor.device_mesh != tensors[0].device_mesh:
            raise InputError(f"{name}: expected the query's mesh {tensors[0].device_mesh}, got {tensor.device_mesh}")
    mesh = tensors[0].device_mesh
    placements = _placements(tensors[:3], is_sharded_by_heads_allowed)
    local = [tensor.redistribute(mesh, placements).to_local() for tensor in tensors[:3]]
    others = [tensor.full_tensor() if is_distributed(tensor) else tensor for tensor in tensors[3:]]
    result = attend((*local, *others))

    def spread(part: Tensor) -> DTensor:
        return DTensor.from_local(part, mesh, placements, run_check=False)

    return tuple(map(spread, result)) if isinstance(result, tuple) else spread(result)


def _placements(tensors: tuple[DTensor, ...], may_shard: bool) -> list[Placement]:
    """Those of the query for each mesh dim on which all split the batch, or all the heads, evenly; else replicated."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensors[0].device_mesh
    kept: list[Placement] = []
    shards = dict.fromkeys(_BATCH_AND_HEADS, 1)
    for mesh_dim, placement in enumerate(tensors[0].placements):
        agree = all(tensor.placements[mesh_dim] == placement for tensor in tensors)
        if may_shard and agree and type(placement) is Shard and placement.dim in _BATCH_AND_HEADS:
            count = shards[placement.dim] * mesh.size(mesh_dim)
            if all(tensor.shape[placement.dim] % count == 0 for tensor in tensors):
                shards[placement.dim] = count
                kept.append(placement)
                continue
        kept.append(Replicate())
    return kept
