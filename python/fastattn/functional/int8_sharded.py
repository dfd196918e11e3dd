"""``int8_linear`` over a weight whose rows are sharded: each rank computes the columns of its own rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastattn.activations import GATED, result_columns
from fastattn.checks import expect, type_name
from fastattn.errors import InputError
from fastattn.functional.distributed_tensors import redistributed_local
from fastattn.functional.int8_linear import linear_over
from fastattn.functional.int8_tensor import Int8Tensor


def linear_over_sharded(
    x: Tensor,
    weight: DTensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    input_precision: str,
) -> DTensor:
    """Runs ``int8_linear`` over DTensor; ``bias`` and ``residual`` may be plain tensors, the same on each rank."""
    if not isinstance(x, DTensor):
        # A weight that FSDP shards is a DTensor too, but its ranks have different x and must gather the weight first.
        raise TypeError(f"x: expected a DTensor, as the weight is one, got {type_name(x)}")
    expect(x.device_mesh == weight.device_mesh, "x", f"a DTensor on {weight.device_mesh}", x.device_mesh)
    own = weight.to_local()
    of_weight, *others = weight.placements
    has_rows = not others and isinstance(of_weight, (Shard, _StridedShard)) and of_weight.dim == 0
    if not has_rows or not isinstance(own, Int8Tensor):
        raise InputError(f"weight: expected an int8 weight that is sharded by rows, got {weight.placements}")
    is_gated = activation in GATED
    if is_gated:
        by = f"fastattn.distributed.ColwiseParallel(fused=2), as {activation!r} needs rows of both halves"
        expect(of_weight == _StridedShard(0, split_factor=2), "weight", f"one that is sharded by {by}", of_weight)

    of_result = _along(Shard(0) if is_gated else of_weight, x.dim() - 1)
    own_x = redistributed_local(x, [Replicate()], [Partial()])
    parts = _own(bias, of_weight, weight), activation, _own(residual, of_result, weight), input_precision
    y = linear_over(own_x, own.int8_data, own.int8_scale, *parts)
    shape = torch.Size((*x.shape[:-1], result_columns(activation, weight.shape[0])))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, weight.device_mesh, [of_result], run_check=False, shape=shape, stride=stride)


def _along(placement: Placement, dim: int) -> Placement:
    """Returns the same placement along dimension ``dim``."""
    return _StridedShard(dim, split_factor=placement.split_factor) if type(placement) is _StridedShard else Shard(dim)


def _own(tensor: Tensor | None, placement: Placement, weight: DTensor) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, weight.device_mesh, [Replicate()], run_check=False)
    return redistributed_local(tensor, [placement], [placement])
