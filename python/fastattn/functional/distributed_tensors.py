"""Computes attention over DTensors. Batch entries and heads are independent, so each rank computes those it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.checks import is_distributed, type_name
from fastattn.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Dims(NamedTuple):
    """Holds the indices of a tensor's batch dimension and heads dimension (KV heads for keys and values), or None.

    For a result without a batch dimension, ``over_batch`` is the reduction over ranks with different batch entries.
    """

    batch: int | None
    heads: int | None
    over_batch: str | None = None


DENSE, PACKED, NEITHER = Dims(0, 1), Dims(None, 1), Dims(None, None)
PER_HEAD = PACKED_LSE = Dims(None, 0)
MAX_LOGIT = Dims(None, 0, "max")

_Results = TypeVar("_Results")


def attend_over_distributed(call: AttentionCall, attend: Callable[[AttentionCall], _Results]) -> _Results:
    """Runs ``attend`` on each rank over its shards of the call's tensors; the query is a DTensor."""
    if call.dropout_p and call.dropout_seed is None:
        raise InputError(
            "dropout_seed: expected an int with DTensors, the same on each rank, got None; pass an int that you change "
            "in each step"
        )
    queries, lse = (PACKED, PACKED_LSE) if call.is_packed else (DENSE, DENSE)
    others = [of for of, wanted in ((lse, call.return_lse), (MAX_LOGIT, call.return_max_logit)) if wanted]
    dims = {
        **dict.fromkeys(("query", "key", "value"), queries),
        "bias": dims_of_mask(_shape(call.bias)),
        "key_ranges": dims_of_mask(_shape(call.key_ranges)[:-1]),
        "alibi_slopes": dims_of_options(_shape(call.alibi_slopes)),
        "sinks": dims_of_options(_shape(call.sinks)),
    }
    _check_sizes(call, dims)
    tensors = call.tensors
    all_dims = tuple(dims.get(name, NEITHER) for name in call._fields[: len(tensors)])
    return attend_locally(
        tensors, all_dims, (queries, *others), call.dropout_p == 0, lambda local: attend(call.with_tensors(local))
    )


def _check_sizes(call: AttentionCall, dims: dict[str, Dims]) -> None:
    """Checks batch sizes and heads of the whole tensors, because shards can fit together if whole tensors do not."""
    query, query_dims = call.query, dims["query"]
    if query.dim() < 3:  # each rank's check of its shard will raise
        return
    for name, its_dims in dims.items():
        tensor = getattr(call, name)
        if not isinstance(tensor, Tensor) or (tensor.dim() != query.dim() and name in ("key", "value")):
            continue  # each rank's check will raise here, too
        pairs = ("batch size", its_dims.batch, query_dims.batch), ("heads", its_dims.heads, query_dims.heads)
        for what, dim, query_dim in pairs:
            is_grouped = what == "heads" and name in ("key", "value")
            if dim is None or query_dim is None or is_grouped or tensor.shape[dim] == query.shape[query_dim]:
                continue
            raise InputError(f"{name}: expected the query's {what} {query.shape[query_dim]}, got {tensor.shape[dim]}")


def dims_of_options(shape: Sequence[int]) -> Dims:
    """Returns the dims of an option ``[Hq]`` or ``[1 or B, Hq]``."""
    if len(shape) == 2:
        return Dims(0 if shape[0] > 1 else None, 1)
    return PER_HEAD if len(shape) == 1 else NEITHER


def dims_of_mask(shape: Sequence[int]) -> Dims:
    """Returns the dims of a mask that broadcasts to ``[B, Hq, Sq, Sk]``: a dimension of size 1 counts as None."""

    def dim(of_scores: int) -> int | None:
        own = of_scores + len(shape) - 4
        return own if own >= 0 and shape[own] > 1 else None

    return Dims(dim(0), dim(1))


def _shape(tensor: Any) -> Sequence[int]:
    """Returns the shape of a tensor, or () for another argument. Later checks raise an error for it if it is wrong."""
    return tensor.shape if isinstance(tensor, Tensor) else ()


def attend_locally(
    tensors: tuple[Any, ...],
    dims: tuple[Dims, ...],
    dims_of_results: tuple[Dims, ...],
    may_shard: bool,
    attend: Callable[[tuple[Any, ...]], _Results],
) -> _Results:
    """Runs ``attend`` on each rank over its shards. Returns one DTensor or several, sharded like the query.

    A rank computes the batch entries and heads of its shard of the query. If the query is sharded along another
    dimension, or unevenly, every rank computes all batch entries and heads.

    Args:
        tensors: query, key and value, which must be DTensors, then the other arguments of the call. Each other argument
            is a DTensor, or a plain tensor that is the same on each rank; the gradient of a plain tensor is gathered or
            summed over all ranks. ``attend`` gets the part of each tensor that belongs to the rank.
        dims: for each tensor, which of its dimensions are batch and heads.
        dims_of_results: the same for each result.
        may_shard: if False, every rank computes all batch entries and heads. Options whose effect depends on the index
            of an entry or a head, such as dropout, need this.

    Raises:
        InputError: query, key or value is not a DTensor, or they are on several meshes.
    """
    from torch.distributed.tensor import DTensor

    for name, tensor in zip(("query", "key", "value"), tensors, strict=False):
        if not is_distributed(tensor):
            raise InputError(
                f"{name}: expected a DTensor, because query, key or value is one, got {type_name(tensor)}; convert it "
                "with DTensor.from_local, or pass to_local() of the DTensors"
            )
        if tensor.device_mesh != tensors[0].device_mesh:
            came = f"{tensor.device_mesh}; distribute both over one mesh"
            raise InputError(f"{name}: expected the query's mesh {tensors[0].device_mesh}, got {came}")
    mesh = tensors[0].device_mesh
    kinds = _kinds(tensors[:3], dims[0], may_shard)
    local = tuple(_local(tensor, mesh, kinds, of) for tensor, of in zip(tensors, dims, strict=True))
    result: Any = attend(local)

    def spread(part: Tensor, of: Dims) -> DTensor:
        return DTensor.from_local(part, mesh, [placement(kind, of) for kind in kinds], run_check=False)

    whole: Any = (
        tuple(map(spread, result, dims_of_results)) if isinstance(result, tuple) else spread(result, dims_of_results[0])
    )
    return whole


def are_split_alike(query: Any, key: Any, value: Any, mask_sizes: Sequence[int], enable_gqa: bool) -> bool:
    """Returns whether query, key and value ``[B, H, S, D]`` are DTensors whose sizes fit together and fit
    ``mask_sizes``, and whose shards are equal parts of the batch or the heads, with the same placements."""
    tensors = (query, key, value)
    if not all(is_distributed(tensor) and tensor.dim() == 4 for tensor in tensors):
        return False
    query_sizes, key_sizes, value_sizes = (tensor.shape[:2] for tensor in tensors)
    (batch, heads), (key_batch, kv_heads) = query_sizes, key_sizes
    if key_sizes != value_sizes or batch != key_batch or (heads != kv_heads and not enable_gqa):
        return False
    mask = dims_of_mask(mask_sizes)
    for dim, size in zip((mask.batch, mask.heads), query_sizes, strict=True):
        if dim is not None and mask_sizes[dim] != size:
            return False
    if any((t.device_mesh, t.placements) != (query.device_mesh, query.placements) for t in tensors):
        return False
    kinds = _kinds(tensors, DENSE, True)
    return all(placement.is_replicate() or kind for placement, kind in zip(query.placements, kinds, strict=True))


def _kinds(tensors: tuple[DTensor, ...], dims: Dims, may_shard: bool) -> list[str | None]:
    """Returns for each mesh dimension what it shards evenly: ``"batch"``, ``"heads"``, or None for neither."""
    from torch.distributed.tensor import Shard

    query = tensors[0]
    kinds: list[str | None] = []
    shards = {"batch": 1, "heads": 1}
    for mesh_dim, placement in enumerate(query.placements):
        found = None
        for kind, dim in (("batch", dims.batch), ("heads", dims.heads)):
            if may_shard and dim is not None and type(placement) is Shard and placement.dim == dim:
                count = shards[kind] * query.device_mesh.size(mesh_dim)
                if all(tensor.dim() > dim and tensor.shape[dim] % count == 0 for tensor in tensors):
                    shards[kind], found = count, kind
        kinds.append(found)
    return kinds


def placement(kind: str | None, dims: Dims) -> Placement:
    """Returns the placement of a tensor on a mesh dimension that shards ``kind``: batch, heads or None."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dim = {None: None, "batch": dims.batch, "heads": dims.heads}[kind]
    if dim is not None:
        return Shard(dim)
    return Partial(dims.over_batch) if kind == "batch" and dims.over_batch is not None else Replicate()


def _local(tensor: Any, mesh: Any, kinds: list[str | None], dims: Dims) -> Any:
    """Returns this rank's shard of a tensor. If ranks have different shards of the query but the same shard of the
    tensor, the tensor's gradient is the sum over these ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(tensor, Tensor):
        return tensor
    if not is_distributed(tensor):
        if not any(kinds) or (dims == NEITHER and not tensor.requires_grad):
            return tensor
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements = [placement(kind, dims) for kind in kinds]
    grad_placements = [
        Partial() if kind is not None and own.is_replicate() else own
        for kind, own in zip(kinds, placements, strict=True)
    ]
    return redistributed_local(tensor, placements, grad_placements)


def redistributed_local(
    tensor: DTensor, placements: Sequence[Placement], grad_placements: Sequence[Placement]
) -> Tensor:
    """Returns this rank's shard of ``tensor`` in ``placements``; the shard's gradient has ``grad_placements``."""
    local: Tensor = tensor.redistribute(placements=placements).to_local(grad_placements=grad_placements)
    if type(local).__name__ == "AsyncCollectiveTensor":  # the collective is still in flight
        return torch.ops._c10d_functional.wait_tensor(local)
    return local
