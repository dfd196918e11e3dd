"""int8 layers under DDP, FSDP2 and tensor parallel, on two processes: as the layers of one process."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastattn import InputError
from fastattn.nn import Int8Tensor, quantize_model

# hidden and outer features, granularity: aligned and not, and rows that two ranks do not share evenly
SIZES: tuple[tuple[int, int, str | int], ...] = ((64, 64, "tensor"), (64, 64, 32), (45, 40, "channel"))
EVEN_SIZES = (*SIZES[:2], (48, 40, "channel"))


def model_of(hidden: int, outer: int, granularity: str | int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(outer, hidden), nn.ReLU(), nn.Linear(hidden, outer))
    quantize_model(model, granularity)
    return model


def assert_alike(model: nn.Module, expected: nn.Module, outer: int) -> None:
    x = torch.randn(2, 3, outer, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):  # FSDP2 gathers into the same memory from the second time on
        actual, wanted = model(x), expected(x)
        torch.testing.assert_close(actual, wanted)
        grad_out = torch.ones_like(wanted)
        gradients = torch.autograd.grad(actual, x, grad_out)[0], torch.autograd.grad(wanted, x, grad_out)[0]
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)


def check_ddp(rank: int, mesh: DeviceMesh) -> None:
    """Ranks that differ take what rank 0 has, to the bit, once; later forward passes send nothing."""
    for hidden, outer, granularity in SIZES:
        model, expected = (model_of(hidden, outer, granularity, seed) for seed in (rank, 0))
        parallel = nn.parallel.DistributedDataParallel(model)
        for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(actual, wanted)
        parallel(torch.ones(3, outer)).sum().backward()
        assert model[0].bias.grad is not None and model[0].weight.grad is None
        assert list(model.buffers()) == []
        assert_alike(model, expected, outer)


def check_fsdp(rank: int, mesh: DeviceMesh) -> None:
    for hidden, outer, granularity in SIZES:
        model, other, expected = (model_of(hidden, outer, granularity, seed) for seed in (0, 1, 0))
        for each in (model, other):
            for module in (each[0], each[2], each):
                fully_shard(module, mesh=mesh)
        shard = model[0].weight.to_local()
        assert isinstance(shard, Int8Tensor)
        rows = (hidden + 1) // 2
        assert shard.shape == (rows if rank == 0 else hidden - rows, outer)
        assert_alike(model, expected, outer)
        other.load_state_dict(model.state_dict())
        assert_alike(other, expected, outer)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(whole["0.weight"], expected[0].weight)


def check_tensor_parallel(rank: int, mesh: DeviceMesh) -> None:
    for hidden, outer, granularity in EVEN_SIZES:
        model, expected = model_of(hidden, outer, granularity), model_of(hidden, outer, granularity)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer, shape in ((model[0], (hidden // 2, outer)), (model[2], (outer, hidden // 2))):
            assert isinstance(layer.weight, DTensor) and isinstance(layer.weight.to_local(), Int8Tensor)
            assert layer.weight.to_local().shape == shape
        assert_alike(model, expected, outer)
        for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert isinstance(actual, DTensor)
            assert torch.equal(actual.full_tensor(), wanted)
        model[2].input_precision = "int8"
        with pytest.raises(InputError, match="input_precision: expected '16bit' for a weight that is sharded"):
            model(torch.ones(1, outer))


def _run(rank: int, port: int, checks: tuple[Callable[[int, DeviceMesh], None], ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for check in checks:
        check(rank, mesh)
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_compute_what_one_does() -> None:
    """One pair of processes for all checks: starting them takes longer than what they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    checks = (check_ddp, check_fsdp, check_tensor_parallel)
    torch.multiprocessing.spawn(_run, (port, checks), nprocs=2)
