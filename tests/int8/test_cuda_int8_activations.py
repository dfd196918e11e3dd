"""Tests the CUDA C++ int8 matmul with int8 activations against the oracle over the same int8 tokens.

test_quantize_tokens.py tests these, and test_cuda_int8_activations_sm90.py what only Hopper's kernel
does. They run on a GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import fastattn
import instances
from cuda_kernels import DTYPES, EMULATED, MARKS, each_dtype, only_emulated
from fastattn import native, reference
from int8_cases import GRANULARITIES, assert_near_int8_oracle, normal, quantised
from int8_kernels import ARCH, INT8_ACTIVATIONS, Kernels, on
from int8_kernels import running_sm80 as running
from kernel_device import DEVICE
from test_cuda_int8 import OP, arguments, fp32, int8, zeros

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime

pytestmark = MARKS

BLOCKS = (16, 64, 128)  # tokens per tile
KERNEL = "int8_matmul_s8_sm80"

on_both = on("sm_80", "sm_90")

each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


def matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    out: Tensor = torch.ops.fastattn.int8_matmul(x, weight, scale, bias, residual, activation, True)
    return out


def check(*arguments: Any, **how: Any) -> Tensor:
    return Kernels("sm_80").check_int8_activations(*arguments, **{"seed": 0, **how})


# --- Shapes -----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("m", [1, 5, 16, 17, 65, 130])
def test_shapes(m: int, dtype: torch.dtype) -> None:
    """Outputs and columns are about a tile and a step: a little less or more, and more than one."""
    for n, k in [(8, 16), (120, 112), (136, 144), (264, 272)]:
        check(normal(m, k, seed=1, dtype=dtype), *quantised(n, k, "channel", seed=m), seed=n)


@each_dtype
@each_granularity
@pytest.mark.parametrize("m", [3, 40, 130])
def test_granularities(m: int, granularity: str | int, dtype: torch.dtype) -> None:
    for k in (128, 384):
        weight, scale = quantised(136, k, granularity, seed=m)
        check(normal(m, k, seed=1, dtype=dtype), weight, scale, normal(136, seed=2, dtype=dtype))


@only_emulated
@each_dtype
@each_granularity
@pytest.mark.parametrize("m, block", [(13, 16), (61, 64), (125, 128)])
def test_every_tile_whole_and_split(m: int, block: int, granularity: str | int, dtype: torch.dtype) -> None:
    """Two resident CTAs take two whole tiles, or split one tile."""
    for num_sms, n, k in ((1, 256, 128), (2, 128, 1664)):
        weight, scale = quantised(n, k, granularity, seed=m)
        x, bias = normal(m, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
        with running(num_sms, block, seed=0) as found:
            out = matmul(x, weight, scale, bias, activation="silu")
        assert_near_int8_oracle(out, x, weight, scale, bias, activation="silu")
        (launched,) = found
        assert f"{KERNEL}ILi{block}E" in launched.report.kernel
        assert launched.grid[0] == 2 if num_sms == 1 else launched.grid[0] >= 2


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_that_are_no_power_of_two_in_number(group: int) -> None:
    for m in (5, 70):
        check(normal(m, 5 * group, seed=1), *quantised(24, 5 * group, group))


@pytest.mark.parametrize("m, n, k", [(0, 8, 16), (3, 0, 16), (3, 8, 0), (0, 0, 0)])
def test_empty(m: int, n: int, k: int) -> None:
    weight, scale = torch.zeros(n, k, dtype=torch.int8, device=DEVICE), torch.ones(n, 1, device=DEVICE)
    out = matmul(normal(m, k, seed=1), weight, scale, normal(n, seed=2), activation="relu")
    assert torch.equal(out, normal(n, seed=2).relu().expand(m, n))


@on_both
@pytest.mark.parametrize("granularity", ["tensor", "channel", 64])
def test_leading_dims_and_views(granularity: str | int, kernels: Kernels) -> None:
    """Views give the bits of a contiguous copy."""
    weight, scale = quantised(48, 128, granularity)
    wide = normal(2, 5, 200, seed=1)
    wide[..., 136:] = torch.nan
    residual = normal(2, 5, 104, seed=3)[..., :48]
    repeated = wide[:1, :1, :128].expand(2, 5, 128)
    bias = normal(49, seed=4)[1:]
    for x, added in (
        (wide[..., :128], residual),
        (wide[:, ::2, 8:136], None),
        (normal(128, 6, seed=2).t(), None),
        (normal(5, 128, 2, seed=2).permute(2, 0, 1), residual),
        (wide[..., 1:129], residual),
        (repeated, residual),
        (wide[0, 0, :128], None),
    ):
        out = kernels.check_int8_activations(x, weight, scale, bias, added)
        contiguous = None if added is None else added.contiguous()
        assert torch.equal(out, kernels.check_int8_activations(x.contiguous(), weight, scale, bias, contiguous))


# --- CTAs that split tiles and tokens ---------------------------------------------------------------------------------


@only_emulated
@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 64])
@pytest.mark.parametrize("num_sms, m", [(2, 5), (3, 40), (8, 130)])
def test_splits(num_sms: int, m: int, granularity: str | int, dtype: torch.dtype) -> None:
    weight, scale = quantised(72, 1600, granularity)
    extra = normal(72, seed=2, dtype=dtype), normal(m, 72, seed=3, dtype=dtype)
    check(normal(m, 1600, seed=1, dtype=dtype), weight, scale, *extra, activation="gelu", num_sms=num_sms)


@only_emulated
@pytest.mark.parametrize("m", [5, 130])
def test_order_of_ctas_and_copies_has_no_influence(m: int) -> None:
    weight, scale = quantised(136, 1024, 32)
    x = normal(m, 1024, seed=1)
    results = []
    for launching in ({"seed": 100}, {"seed": 1, "workers": 1}):
        with running(num_sms=8, **launching):
            results.append(matmul(x, weight, scale))
    assert torch.equal(*results)


@each_dtype
def test_many_tokens(dtype: torch.dtype) -> None:
    """From 512 tokens on each warp quantises a token; with fewer, all threads of a CTA share one."""
    check(normal(517, 48, seed=1, dtype=dtype), *quantised(24, 48, "channel"), num_sms=3, seed=1)


# --- Values -----------------------------------------------------------------------------------------------------------


@on_both
@each_dtype
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues(activation: str, dtype: torch.dtype, kernels: Kernels) -> None:
    for extra in range(4):
        m, n, k = 4, 40, 640 * kernels.num_sms
        weight, scale = quantised(n, k, "channel", std=0.1)
        bias = normal(n, seed=2, dtype=dtype) if extra % 2 else None
        residual = normal(m, n, seed=3, dtype=dtype) if extra // 2 else None
        x, num_sms = normal(m, k, seed=1, dtype=dtype), kernels.num_sms * (1 + extra)
        kernels.check_int8_activations(x, weight, scale, bias, residual, activation=activation, num_sms=num_sms)


@each_dtype
@pytest.mark.parametrize("k", [1024, 4096])
def test_extreme_sums(k: int, dtype: torch.dtype) -> None:
    """Numbers are -127 and 127, and -128, which quantisation never makes but a weight may contain."""
    weight = torch.full((16, k), 127, dtype=torch.int8, device=DEVICE)
    weight[::3] = -128
    weight[1::3, ::2] = -127
    x = torch.ones(3, k, dtype=dtype, device=DEVICE)
    x[1] = -1.0
    x[2, ::2] = -1.0
    for group in (1, k // 128, k // 32):
        check(x, weight, torch.full((16, group), 2.0**-20, device=DEVICE))


@each_dtype
def test_the_longest_sums(dtype: torch.dtype) -> None:
    k = 2**17
    weight = torch.full((8, k), -128, dtype=torch.int8, device=DEVICE)
    check(torch.ones(1, k, dtype=dtype, device=DEVICE), weight, torch.full((8, 1), 2.0**-24, device=DEVICE))


@on_both
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_scales_of_tokens(granularity: str | int, kernels: Kernels) -> None:
    """Scales range from bf16's smallest to its largest: finite results do not overflow or underflow on the way."""
    weight, scale = quantised(24, 64, granularity)
    x = normal(6, 64, seed=1, dtype=torch.bfloat16)
    x[0] *= 2.0**-100
    x[1] *= 2.0**124
    x[2] *= 2.0**-20
    x[3] = 0.0
    out = kernels.check_int8_activations(x, weight, scale)
    assert bool(out.isfinite().all()) and bool((out[3] == 0).all()) and bool((out[[0, 1]] != 0).any())


@only_emulated
@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 32, 128])
@pytest.mark.parametrize("k", [1040, 4096])
def test_each_cta_quantises_as_the_queue_does(k: int, granularity: str | int, dtype: torch.dtype) -> None:
    """Up to 8 tokens of 2^15 elements in all, each CTA quantises by itself. More tokens use the queue: equal bits."""
    k -= k % granularity if isinstance(granularity, int) else 0
    weight, scale = quantised(136, k, granularity)
    x = normal(9, k, seed=1, dtype=dtype)
    x[2] *= 2.0**-20
    x[3] = 0.0
    x[4, 5], x[6, 7] = torch.inf, torch.nan
    with running(num_sms=6):
        expected = matmul(x, weight, scale)
    for m, seed in ((1, 0), (2, 1), (3, 2), (5, 3), (8, 4)):
        if m * k > 2**15:
            continue
        for rows in (slice(m), slice(9 - m, 9)):
            with running(num_sms=6, seed=seed) as found:
                out = matmul(x[rows], weight, scale)
            assert not any(row.opcode.startswith("ld.acquire") for row in found[0].report.rows)
            assert torch.equal(out, expected[rows]) or torch.equal(out.isnan(), expected[rows].isnan())
            finite = x[rows].isfinite().all(-1)
            assert torch.equal(out[finite], expected[rows][finite])


@pytest.mark.parametrize("block", BLOCKS)
def test_each_tile_takes_a_few_tokens(block: int) -> None:
    """Only the smallest tile has code by which each CTA quantises for itself. The others use the queue."""
    weight, scale = quantised(136, 256, "channel")
    found = []
    for tokens in (BLOCKS[0], block):
        with running(tokens=tokens):
            found.append(matmul(normal(3, 256, seed=1), weight, scale))
    assert torch.equal(*found)


@on_both
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
def test_rows_that_are_not_finite(activation: str, kernels: Kernels) -> None:
    """The whole row is NaN, as in the reference; the other rows are finite."""
    weight, scale = quantised(24, 64, "channel")
    x, bias = normal(5, 64, seed=1), normal(24, seed=2)
    x[1, 4], x[3, 0] = torch.inf, torch.nan
    with kernels.running(INT8_ACTIVATIONS):
        found = matmul(x, weight, scale, bias, None, activation)
    expected = reference.int8_linear(x, weight, scale, bias, activation, input_precision="int8")
    assert torch.equal(found.isnan(), expected.isnan()) and bool(found[[1, 3]].isnan().all())
    assert bool(found[[0, 2, 4]].isfinite().all())


# --- The layer, the dispatcher, the op --------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("m", [3, 70])
def test_the_layer_and_its_gradients(m: int, dtype: torch.dtype) -> None:
    """The gradient passes straight through quantisation: it is that of 16-bit activations."""
    weight = fastattn.quantize_int8(normal(48, 96, seed=1, dtype=torch.float32, std=0.1), 32)
    tensors = normal(m, 96, seed=2, dtype=dtype), normal(48, seed=3, dtype=dtype), normal(m, 48, seed=4, dtype=dtype)
    grad_out = normal(m, 48, seed=5, dtype=dtype)

    def layer(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
        with fastattn.use_backend(backend):
            out = fastattn.int8_linear(leaves[0], weight, leaves[1], residual=leaves[2], input_precision="int8")
            out.backward(grad_out.to(dtype))
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    with running(), fastattn.record() as calls:
        found = layer(dtype, "cuda")
    forward, backward = calls
    assert forward.backend == "cuda" and forward.kernel.startswith(f"{KERNEL}<")
    assert (backward.op, backward.backend) == (f"{OP} backward", "cuda")
    assert backward.kernel.startswith("int8_matmul_grad_input_sm80<")
    expected = layer(torch.float64, "torch")
    for name, actual, oracle in zip(("out", "x", "bias", "residual"), found, expected, strict=True):
        error = (actual.double() - oracle).abs().max() / oracle.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps, name


def test_the_bias_alone_wants_a_gradient() -> None:
    weight, x = fastattn.Int8Weight(*quantised(24, 64, "channel")), normal(5, 64, seed=1)
    bias, grad_out = normal(24, seed=2).requires_grad_(), normal(5, 24, seed=3)
    with running():
        fastattn.int8_linear(x, weight, bias, input_precision="int8").backward(grad_out)
    assert torch.equal(bias.grad, grad_out.float().sum(0).to(bias.dtype))


@pytest.mark.parametrize("granularity", ["channel", 32])
def test_a_model_under_autocast(granularity: str | int) -> None:
    """Its layers run in the kernel, with the results of int8_linear on the cast inputs; parameters are fp32."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)).to(DEVICE)
    weights = [fastattn.quantize_int8(layer.weight, granularity) for layer in (model[0], model[2])]
    fastattn.nn.quantize_model(model, granularity=granularity, input_precision="int8")
    x = normal(5, 64, seed=1, dtype=torch.float32)
    with running(), torch.autocast(x.device.type, torch.bfloat16), fastattn.record() as calls:
        found = model(x)
    name = f"{KERNEL}<16, bfloat16>"
    assert calls == [(OP, "cuda", name), (OP, "cuda", name)]
    with running(), torch.no_grad():
        bias = model[0].bias.bfloat16()
        inner = fastattn.int8_linear(x.bfloat16(), weights[0], bias, input_precision="int8").relu()
        assert torch.equal(found, fastattn.int8_linear(inner, weights[1], input_precision="int8"))


def test_operations_are_counted() -> None:
    weight, x = fastattn.Int8Weight(*quantised(24, 64, "channel")), normal(5, 64, seed=1)
    with running(), FlopCounterMode(display=False) as counter:
        fastattn.int8_linear(x, weight, input_precision="int8")
    assert counter.get_total_flops() == 2 * 5 * 24 * 64


@only_emulated
@each_dtype
@pytest.mark.parametrize("m, n, block", [(1, 16, 16), (61, 256, 64), (125, 256, 128), (300, 128, 128)])
def test_explain_names_the_tile_that_is_launched(m: int, n: int, block: int, dtype: torch.dtype) -> None:
    weight, x = fastattn.Int8Weight(*quantised(n, 256, "channel")), normal(m, 256, seed=1, dtype=dtype)
    with running(num_sms=1) as found:
        explained = fastattn.explain(fastattn.int8_linear, x, weight, input_precision="int8")
        fastattn.int8_linear(x, weight, input_precision="int8")
    name = f"{KERNEL}<{block}, {str(dtype).removeprefix('torch.')}>"
    assert (explained.backend, explained.kernel, explained.tile["block_m"]) == ("cuda", name, block)
    (launched,) = found
    dealt = native.int8_matmul_schedule("int8_matmul_s8", ARCH, 1, False, m, n, 256)
    assert (dealt.block_m, dealt.ctas) == (block, launched.grid[0]) and f"{KERNEL}ILi{block}E" in launched.report.kernel


@pytest.mark.parametrize("n, k", [(12, 32), (16, 24)])
def test_other_weights_go_elsewhere(n: int, k: int) -> None:
    weight = fastattn.Int8Weight(int8(n, k), fp32(n, 1))
    explained = fastattn.explain(fastattn.int8_linear, zeros(1, k), weight, input_precision="int8")
    assert explained.backend == "torch" and "N a multiple of 8 and K a multiple of 16" in explained.rejected["cuda"]
    assert explained.rejected["triton"] == 'the kernels do not have: int8 activations (input_precision="int8").'
    with pytest.raises(RuntimeError, match="8 rows and a multiple of 16 columns, at most 131072, for int8 activations"):
        matmul(zeros(1, k), weight.data, weight.scale)


def test_more_tokens_than_a_launch_counts_go_elsewhere() -> None:
    weight, x = fastattn.Int8Weight(*quantised(8, 16, "channel")), zeros(1, 16).expand(2**24, 16)
    explained = fastattn.explain(fastattn.int8_linear, x, weight, input_precision="int8")
    assert explained.backend == "torch" and "x has 16777216 rows and the weight 8" in explained.rejected["cuda"]


def test_swiglu_goes_elsewhere() -> None:
    weight, x = fastattn.Int8Weight(*quantised(16, 32, "channel")), normal(3, 32, seed=1)
    explained = fastattn.explain(fastattn.int8_linear, x, weight, activation="swiglu", input_precision="int8")
    assert explained.backend == "torch"
    assert 'int8 activations does not have: SwiGLU (activation="swiglu")' in explained.rejected["cuda"]
    with pytest.raises(RuntimeError, match="must not be swiglu with int8 activations"):
        matmul(x, weight.data, weight.scale, activation="swiglu")


def test_rows_of_a_weight_with_room_behind_them() -> None:
    weight, scale = quantised(24, 96, "channel")
    x = normal(20, 64, seed=1)
    with running():
        assert torch.equal(matmul(x, weight[:, :64], scale), matmul(x, weight[:, :64].contiguous(), scale))


def test_longer_sums_go_elsewhere() -> None:
    k = 2**17 + 16
    weight = fastattn.Int8Weight(int8(8, k), fp32(8, 1))
    explained = fastattn.explain(fastattn.int8_linear, zeros(1, k), weight, input_precision="int8")
    assert explained.backend == "torch" and "fit in int32 only up to K = 131072" in explained.rejected["cuda"]
    with pytest.raises(RuntimeError, match="columns, at most 131072, for int8 activations"):
        matmul(zeros(1, k), weight.data, weight.scale)


def test_one_graph_for_any_number_of_tokens() -> None:
    weight, bias = fastattn.Int8Weight(*quantised(24, 64, 32), 32), normal(24, seed=1)

    def layer(x: Tensor) -> Tensor:
        return fastattn.int8_linear(x, weight, bias, activation="gelu", input_precision="int8")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for m in (3, 130):
        x = normal(m, 64, seed=m)
        with running():
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_opcheck_and_vmap() -> None:
    with running():
        torch.library.opcheck(torch.ops.fastattn.int8_matmul.default, (), arguments(int8_activations=True))
        x, weight = normal(3, 5, 64, seed=1), fastattn.Int8Weight(*quantised(24, 64, "channel"))
        mapped = torch.vmap(lambda each: fastattn.int8_linear(each, weight, input_precision="int8"))(x)
        assert torch.equal(mapped, matmul(x, weight.data, weight.scale))


# --- What is launched -------------------------------------------------------------------------------------------------


@only_emulated
@each_granularity
@pytest.mark.parametrize("m", [1, 64, 128])
def test_no_bank_conflicts_and_whole_sectors(m: int, granularity: str | int) -> None:
    weight, scale = quantised(256, 512, granularity)
    with running() as found:
        matmul(normal(m, 512, seed=1), weight, scale)
    (launched,) = found
    assert launched.report.bank_conflicts == 0
    copies = [row for row in launched.report.rows if row.opcode.startswith("cp.async.cg")]
    assert sum(row.global_bytes for row in copies) == 32 * sum(row.global_sectors for row in copies) > 0


@only_emulated
@each_dtype
@pytest.mark.parametrize("m", [1, 8, 9])
def test_few_tokens_move_little_more_than_the_weight(m: int, dtype: torch.dtype) -> None:
    """Each byte of the weight moves once. A CTA reads up to 8 tokens twice; more tokens are quantised once for all."""
    n, k = 512, 1024
    weight, scale = quantised(n, k, "channel")
    x = normal(m, k, seed=1, dtype=dtype)
    with running(num_sms=1) as found:
        out = matmul(x, weight, scale)
    (launched,) = found
    looking = "ld.acquire"  # waits for the tokens: how often varies with the schedule
    assert any(row.opcode.startswith(looking) for row in launched.report.rows) == (m > 8)
    moved = sum(row.global_bytes for row in launched.report.rows if not row.opcode.startswith(looking))
    ctas = launched.grid[0]
    tokens = 2 * ctas * x.nbytes if m <= 8 else (2 + 0.5 + 0.5 * ctas) * x.nbytes
    assert moved <= 1.03 * (weight.nbytes + scale.nbytes + tokens + out.nbytes)
    copied = sum(row.global_bytes for row in launched.report.rows if row.opcode.startswith("cp.async.cg"))
    assert copied == weight.nbytes + (0 if m <= 8 else m * k * (n // 128))


@only_emulated
def test_the_launch_is_the_one_that_a_gpu_would_get() -> None:
    """There is one launch of four warps, and the tensor cores do no more than the tiles' work, all of it in int8."""
    weight, scale = quantised(256, 256, "channel")
    for m, block in ((1, 16), (40, 64), (90, 128), (200, 128)):
        with running() as found:
            matmul(normal(m, 256, seed=1), weight, scale)
        tokens = -(-m // block) * block
        (launched,) = found
        assert launched.grid == (2 * tokens // block, 1, 1) and launched.block == (128, 1, 1)
        assert launched.report.shared_bytes <= 99 * 1024
        ((kind, work),) = launched.report.tensor_core.items()
        assert kind == "s8 * s8 + s32" and work.multiply_adds == tokens * 256 * 256


# name: (instruction, its replacement, tokens, outputs)
FAULTS = {
    "waits for one group less": ("cp.async.wait_group 2;", "cp.async.wait_group 3;", 5, 128),
    "no barrier": ("bar.sync 0;", "", 5, 128),
    "counting tells nothing of the tokens": ("atom.acq_rel.gpu.global.add", "atom.relaxed.gpu.global.add", 9, 512),
    "arrivals tell nothing of the partials": ("atom.acq_rel.gpu.global.add", "atom.relaxed.gpu.global.add", 5, 128),
    "asking tells nothing of the partials": ("ld.acquire.gpu.global", "ld.relaxed.gpu.global", 40, 192),
}


@only_emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(fault: str) -> None:
    instruction, instead, m, n = FAULTS[fault]
    weight, scale = quantised(n, 1024, "channel")
    x = normal(m, 1024, seed=1)
    with (
        cuda_runtime.replaced(instruction, instead),
        pytest.raises(EmulatorError) as caught,
        running(num_sms=2, uninitialised=False),
    ):
        matmul(x, weight, scale)
    assert caught.value.kind == "race"
    check(x, weight, scale, num_sms=2)


def test_every_instance_is_launched() -> None:
    """The tables above have exactly the tiles and dtypes that are compiled."""
    expected = sorted(itertools.product(BLOCKS, instances.DTYPES))
    assert instances.rows_of("int8_matmul/instances/gemm_s8_sm80.cu") == expected and len(DTYPES) == 2
