"""int8 layers under DDP, FSDP2 and tensor parallel, on two processes: as the layers of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fastattn
import ranks
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


class Block(nn.Module):
    """Attention and SwiGLU over ``[B, S, 64]``; ``heads`` and ``kv_heads`` are those of this rank."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        sizes = {"query": (64, 64), "key": (64, 32), "value": (64, 32), "out": (64, 64)}
        sizes |= {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
        for name, (inner, outer) in sizes.items():
            setattr(self, name, nn.Linear(inner, outer, bias=name in ("query", "out", "down")))
        self.norm, self.ffn_norm = nn.RMSNorm(64), nn.RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.feed_forward(self.ffn_norm(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        counts = self.heads, self.kv_heads, self.kv_heads
        layers = self.query, self.key, self.value
        split = [layer(x).unflatten(-1, (n, 16)).transpose(1, 2) for layer, n in zip(layers, counts, strict=True)]
        return self.out(fastattn.attention(*split, causal=True).transpose(1, 2).flatten(2))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def check_sequence_parallel(rank: int, mesh: DeviceMesh) -> None:
    """Norms over a part of the sequence each, attention over half the heads, SwiGLU over half the features."""
    for granularity in ("tensor", "channel", 32):
        blocks = []
        for heads, kv_heads in ((2, 1), (4, 2)):
            torch.manual_seed(3)
            blocks.append(Block(heads, kv_heads))
            quantize_model(blocks[-1], granularity)
        block, expected = blocks
        whole = ColwiseParallel(input_layouts=Shard(1))
        part = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan = dict.fromkeys(("query", "key", "value", "gate", "up"), whole) | {"out": part, "down": part}
        plan |= {"norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)
        assert block.query.weight.to_local().shape == (32, 64)
        x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(4)).requires_grad_()
        shared = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
        actual, wanted = block(shared), expected(x)
        torch.testing.assert_close(actual.full_tensor(), wanted)
        actual.full_tensor().sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(shared.grad.full_tensor(), x.grad)
        for name in ("query", "out"):
            bias = getattr(block, name).bias.grad
            torch.testing.assert_close(bias.full_tensor(), getattr(expected, name).bias.grad)


def test_ranks_compute_what_one_does() -> None:
    """One pair of processes for all checks: starting them takes longer than what they do."""
    checks = (check_ddp, check_fsdp, check_tensor_parallel, check_sequence_parallel)
    ranks.run(__name__, *(check.__name__ for check in checks), emulated=False)
