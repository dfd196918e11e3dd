"""Shards linear layers that fuse several layers, so that each rank has rows of every fused layer."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor, parallel
from torch.distributed.tensor.placement_types import _StridedShard

from fastattn.checks import check_int, expect


class ColwiseParallel(parallel.ColwiseParallel):
    """Extends ``torch.distributed.tensor.parallel.ColwiseParallel`` to a linear layer that fuses several layers.

    A fused weight ``[fused * N, K]`` stacks the rows of its layers, such as gate and up of SwiGLU in
    ``int8_linear(..., activation="swiglu")`` and in ``gate_up_proj`` of Hugging Face's models. Torch's class gives the
    rows of gate to the first ranks and the rows of up to the last ranks. Here each of W ranks holds N / W rows of every
    fused layer, with their scales. ``chunk(2, -1)`` of a rank's result then returns its gate and up values, and results
    computed from both are sharded as torch's ``RowwiseParallel`` expects.

    Parameters are DTensors that record this order: ``full_tensor()``, and state dicts with ``full_state_dict=True``
    (``torch.distributed.checkpoint.state_dict``), have the rows in the order of the whole layer. Sharded checkpoints
    (``torch.distributed.checkpoint.save``) refuse these DTensors, because the rows of a rank are not consecutive.

    Args:
        fused: the number of layers, of equal size, in the weight: 2 for gate and up. With 1 this is torch's class.
        input_layouts, output_layouts, use_local_output: as for torch's class. Without ``output_layouts``, and with
            ``use_local_output=False``, the result is a DTensor that records the order of its columns too.

    Raises:
        InputError: (``parallelize_module``) the ranks do not divide the rows of each fused layer.
        TypeError: (``parallelize_module``) ``fused`` is more than 1, and the module is no ``nn.Linear``.
    """

    def __init__(
        self,
        *,
        fused: int = 1,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.fused = check_int("fused", fused, minimum=1)
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts or self._shard(-1),
            use_local_output=use_local_output,
        )

    def _shard(self, dim: int) -> Placement:
        return Shard(dim) if self.fused == 1 else _StridedShard(dim, split_factor=self.fused)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.fused > 1:
            if not isinstance(module, nn.Linear):
                came = f"{type(module).__name__}; pass fused=1 for other modules"
                raise TypeError(f"module: expected an nn.Linear of {self.fused} fused layers, got {came}")
            rows, ranks = module.weight.shape[0], device_mesh.size()
            divided = f"rows that are a multiple of {self.fused} fused layers times {ranks} ranks"
            expect(rows % (self.fused * ranks) == 0, "weight", divided, list(module.weight.shape))
        return super()._apply(module, device_mesh)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, whole in module.named_parameters():
            part = distribute_tensor(whole, device_mesh, [self._shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(part, requires_grad=whole.requires_grad))
