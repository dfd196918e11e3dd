"""Tests that int8 layers under DDP, FSDP2 and tensor parallel, on two and four processes, equal one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fastattn
import ranks
from fastattn import InputError, distributed
from fastattn.nn import Int8Linear, Int8Tensor, quantize_model

# torch 2.11 cannot redistribute strided shards, which fused rows have; torch 2.12 can.
NO_STRIDED_SHARDS = torch.__version__.startswith("2.11.")
# hidden features, outer features, granularity: aligned, not aligned, and rows that two ranks divide unevenly
SIZES: tuple[tuple[int, int, str | int], ...] = ((64, 64, "tensor"), (64, 64, 32), (45, 40, "channel"))
EVEN_SIZES = (SIZES[0], (128, 64, 32), (48, 40, "channel"))


def model_of(hidden: int, outer: int, granularity: str | int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(outer, hidden), nn.ReLU(), nn.Linear(hidden, outer))
    quantize_model(model, granularity)
    return model


def assert_alike(model: nn.Module, expected: nn.Module, outer: int) -> None:
    x = torch.randn(2, 3, outer, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):  # from the second time on, FSDP2 gathers into the same memory
        actual, wanted = model(x), expected(x)
        torch.testing.assert_close(actual, wanted)
        grad_out = torch.ones_like(wanted)
        gradients = torch.autograd.grad(actual, x, grad_out)[0], torch.autograd.grad(wanted, x, grad_out)[0]
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)


def check_ddp(rank: int, mesh: DeviceMesh) -> None:
    """Ranks with other weights take rank 0's once, bit for bit; later forward passes send nothing."""
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
        rows = -(-hidden // mesh.size())
        assert shard.shape == (min(rows, hidden - rank * rows), outer)
        assert_alike(model, expected, outer)
        other.load_state_dict(model.state_dict())
        assert_alike(other, expected, outer)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(whole["0.weight"], expected[0].weight)


def check_fsdp_policies(rank: int, mesh: DeviceMesh) -> None:
    """Mixed precision changes the computation but neither int8 data nor scales; offloaded weights are gathered."""
    bfloat16, offload = MixedPrecisionPolicy(torch.bfloat16), CPUOffloadPolicy(pin_memory=False)
    policies: tuple[dict[str, Any], ...] = ({"mp_policy": bfloat16}, {"offload_policy": offload})
    for hidden, outer, granularity in SIZES:
        for options in (*policies, policies[0] | policies[1]):
            dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
            model, expected = model_of(hidden, outer, granularity), model_of(hidden, outer, granularity).to(dtype)
            gathered: list[nn.Parameter] = []
            model[0].register_forward_hook(lambda layer, *_, gathered=gathered: gathered.append(layer.weight))
            for module in (model[0], model[2], model):
                fully_shard(module, mesh=mesh, **options)
            x = torch.randn(3, outer, generator=torch.Generator().manual_seed(1))
            for _ in range(2):
                actual, wanted = model(x), expected(x.to(dtype))
                weight = gathered.pop()
                assert isinstance(weight, Int8Tensor) and actual.dtype == weight.dtype == dtype
                assert (weight.int8_data.dtype, weight.int8_scale.dtype) == (torch.int8, torch.float32)
                assert torch.equal(actual, wanted)
                for each, y in ((model, actual), (expected, wanted)):
                    each.zero_grad()
                    y.sum().backward()
            for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                assert actual.dtype == torch.float32  # stored parameters keep their dtype
                if actual.requires_grad:
                    assert torch.equal(actual.grad.full_tensor(), wanted.grad.float())
                else:
                    assert torch.equal(actual.full_tensor(), wanted)


def check_tensor_parallel(rank: int, mesh: DeviceMesh) -> None:
    for hidden, outer, granularity in EVEN_SIZES:
        model, expected = model_of(hidden, outer, granularity), model_of(hidden, outer, granularity)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        part = hidden // mesh.size()
        for layer, shape in ((model[0], (part, outer)), (model[2], (outer, part))):
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
    """Attention and SwiGLU over ``[B, S, 64]``, with this rank's ``heads`` and ``kv_heads``."""

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
    """Norms run over half the sequence, attention over half the heads, SwiGLU over half the features."""
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


class FusedFeedForward(nn.Module):
    """SwiGLU over one weight of gates and ups, computed in the layer's kernel or after it."""

    def __init__(self, hidden: int, outer: int, granularity: str | int | None, in_kernel: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gate_up, self.down = nn.Linear(outer, 2 * hidden), nn.Linear(hidden, outer)
        self.in_kernel = in_kernel
        if granularity is not None:
            quantize_model(self, granularity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_kernel:
            layer = self.gate_up
            return self.down(fastattn.int8_linear(x, layer.weight, layer.bias, activation="swiglu"))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def parallel_feed_forward(mesh: DeviceMesh, colwise: ColwiseParallel, *arguments: Any) -> FusedFeedForward:
    model = FusedFeedForward(*arguments)
    parallelize_module(model, mesh, {"gate_up": colwise, "down": RowwiseParallel()})
    if model.in_kernel:  # no hook of the layer turns the input into a DTensor
        whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        parallelize_module(model, mesh, whole)
    return model


def check_fused_gate_up(rank: int, mesh: DeviceMesh) -> None:
    """Each rank has half of the gates and half of the ups."""
    if NO_STRIDED_SHARDS:
        return
    half = distributed.ColwiseParallel(fused=2)
    whole_state = StateDictOptions(full_state_dict=True)
    for hidden, outer, granularity in (*EVEN_SIZES, (64, 64, None)):
        for in_kernel in (False, True)[: 1 if granularity is None else 2]:
            arguments = hidden, outer, granularity, in_kernel
            model, expected = parallel_feed_forward(mesh, half, *arguments), FusedFeedForward(*arguments)
            assert_alike(model, expected, outer)
            x = torch.ones(2, outer)
            for each in (model, expected):
                each(x).square().sum().backward()
            for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(actual.full_tensor(), wanted)
                if wanted.requires_grad:
                    torch.testing.assert_close(actual.grad.full_tensor(), wanted.grad)
            if granularity is None:
                continue
            own, part = model.gate_up.weight.to_local(), hidden // mesh.size()
            rows = [first + rank * part + i for first in (0, hidden) for i in range(part)]
            assert torch.equal(own.int8_data, expected.gate_up.weight.int8_data[rows])
            assert own.int8_data.untyped_storage().nbytes() == 2 * part * -(-outer // 16) * 16
            whole_scale = expected.gate_up.weight_scale
            assert torch.equal(own.int8_scale, whole_scale if granularity == "tensor" else whole_scale[rows])
            assert own.int8_scale.untyped_storage().nbytes() == 4 * own.int8_scale.numel()
            state = get_model_state_dict(model, options=whole_state)
            assert torch.equal(state["gate_up.weight"], expected.gate_up.weight)
            with torch.no_grad():
                model.gate_up.weight.zero_()
            set_model_state_dict(model, state, options=whole_state)
            assert_alike(model, expected, outer)

    model = parallel_feed_forward(mesh, ColwiseParallel(), 64, 64, "channel", True)
    with pytest.raises(InputError, match=r"weight: expected .*fastattn\.distributed\.ColwiseParallel\(fused=2\)"):
        model(torch.ones(1, 64))
    with pytest.raises(TypeError, match=r"x: expected a DTensor, as the weight is one, got torch\.Tensor"):
        fastattn.int8_linear(torch.ones(1, 64), model.gate_up.weight)
    with pytest.raises(InputError, match="weight: expected an int8 weight that is sharded by rows"):
        fastattn.int8_linear(distribute_tensor(torch.ones(1, 64), mesh), model.down.weight)
    for layer in (nn.Linear(8, 2 * mesh.size() + 2), Int8Linear(8, 2 * mesh.size() + 1)):
        with pytest.raises(InputError, match="weight: expected rows that are a multiple of 2 fused layers"):
            parallelize_module(layer, mesh, half)
    with pytest.raises(TypeError, match=r"module: expected an nn\.Linear"):
        parallelize_module(nn.Embedding(8, 8), mesh, half)


def check_sharded_arguments(rank: int, mesh: DeviceMesh) -> None:
    """Torch's class or ours shards rows, evenly or not (fused ones evenly). Other arguments are sharded, too."""
    torch.manual_seed(6)
    x = torch.randn(3, 40)
    whole_x = distribute_tensor(x, mesh).requires_grad_()
    for rows, colwise in (
        (25, ColwiseParallel()),
        (25, distributed.ColwiseParallel()),
        (24, distributed.ColwiseParallel(fused=3)),
    )[: 2 if NO_STRIDED_SHARDS else 3]:
        layer, expected = (model_of(rows, 40, "channel")[0] for _ in range(2))
        parallelize_module(layer, mesh, colwise)
        residual = torch.randn(3, rows)
        for precision in ("16bit", "int8"):
            options = {"activation": "gelu", "residual": residual, "input_precision": precision}
            actual = fastattn.int8_linear(whole_x, layer.weight, layer.bias, **options)
            wanted = fastattn.int8_linear(x, expected.weight, expected.bias, **options)
            torch.testing.assert_close(actual.full_tensor(), wanted)


@pytest.mark.slow
def test_ranks_compute_what_one_does() -> None:
    """One pair of processes runs all checks, as starting processes takes longer than the checks."""
    checks = (check_ddp, check_fsdp, check_fsdp_policies, check_tensor_parallel, check_fused_gate_up)
    checks += (check_sharded_arguments, check_sequence_parallel)
    ranks.run(__name__, *(check.__name__ for check in checks), emulated=False)


@pytest.mark.slow
def test_four_ranks_compute_what_one_does() -> None:
    checks = (check_fsdp, check_tensor_parallel, check_fused_gate_up)
    ranks.run(__name__, *(check.__name__ for check in checks), world_size=4, emulated=False)
