"""Tests the CUDA C++ int8 matmul and its input gradient for sm_80 against the oracle.

They run on a GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
import instances
import int8_cases
from cuda_kernels import EMULATED, MARKS, checked, each_dtype, only_emulated
from fastattn import native
from int8_cases import GRANULARITIES, epilogue, normal, quantised
from int8_kernels import ARCH, Kernels
from int8_kernels import FORWARD as OP
from int8_kernels import GRADIENT as GRAD_OP
from int8_kernels import running_sm80 as running
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = MARKS

BLOCKS = (16, 32, 48, 64, 80, 96, 112, 128)  # tokens per tile
SM80 = Kernels("sm_80")

each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


def blocks_of(found: list[Any]) -> list[int]:
    """Returns the tokens per tile of recorded launches."""
    names = [re.search(rf"{OP}(?:_grad_input)?_sm80ILi(\d+)E", launched.report.kernel) for launched in found]
    return [int(name[1]) for name in names if name]


def int8_matmul(*arguments: Any) -> Tensor:
    return getattr(torch.ops.fastattn, OP)(*arguments)


def grads(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input and of the bias."""
    return getattr(torch.ops.fastattn, GRAD_OP)(*arguments)


def grad_input(*arguments: Any) -> Tensor:
    return grads(*arguments, False)[0]


# --- Shapes -----------------------------------------------------------------------------------------------------------

# Outputs and columns are about a tile and a step: equal, a little less or more, and more than one.
SIZES = [(8, 16), (120, 112), (128, 128), (136, 144), (264, 272)]


@each_dtype
@pytest.mark.parametrize("m", [1, 7, 16, 17, 64, 65, 97, 129])
def test_shapes(m: int, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        weight, scale = quantised(n, k, "channel", seed=m)
        SM80.check_forward(normal(m, k, seed=1, dtype=dtype), weight, scale, how={"seed": n})
        SM80.check_gradients(normal(m, n, seed=2, dtype=dtype), weight, scale, seed=n)


@each_dtype
@each_granularity
@pytest.mark.parametrize("m", [3, 40, 90, 130])
def test_granularities(m: int, granularity: str | int, dtype: torch.dtype) -> None:
    for k in (128, 384):
        weight, scale = quantised(136, k, granularity, seed=m)
        SM80.check_forward(normal(m, k, seed=1, dtype=dtype), weight, scale, normal(136, seed=2, dtype=dtype))
        SM80.check_gradients(normal(m, 136, seed=3, dtype=dtype), weight, scale)


# --- Sums that are split among CTAs -----------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 64])
@pytest.mark.parametrize("num_sms, outputs, depth", [(1, 256, 128), (2, 384, 3328)], ids=["whole", "in ranges"])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_tile(
    block: int, num_sms: int, outputs: int, depth: int, granularity: str | int, dtype: torch.dtype
) -> None:
    """Two resident CTAs take two whole tiles; four take three tiles, in splits that cross tiles."""
    m = block - 3
    weight, scale = quantised(outputs, depth, granularity, seed=m)
    transposed = quantised(depth, outputs, "channel", seed=m)
    x, bias = normal(m, depth, seed=1, dtype=dtype), normal(outputs, seed=2, dtype=dtype)
    residual = normal(m, outputs, seed=3, dtype=dtype)
    with running(num_sms, seed=block) as found:
        int8_cases.check_forward(int8_matmul, x, weight, scale, bias, residual, "gelu")
        int8_cases.check_grad_input(grads, x, *transposed)
    assert blocks_of(found) == [block] * len(found)
    assert [launched.grid[0] for launched in found] == [2 * num_sms] * len(found)


@only_emulated
@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 64])
@pytest.mark.parametrize("num_sms, m, outputs", [(1, 5, 10), (3, 40, 72), (4, 20, 640), (7, 130, 138), (50, 7, 264)])
def test_shared_tiles(num_sms: int, m: int, outputs: int, granularity: str | int, dtype: torch.dtype) -> None:
    """Two or many CTAs split tiles, with splits that end with a tile or cross into the next."""
    weight, scale = quantised(outputs, 1600, granularity)
    arguments = (normal(m, 1600, seed=1, dtype=dtype), weight, scale)
    for activation in ("gelu", "swiglu"):
        extra = epilogue(activation, m, outputs, dtype)
        out = SM80.check_forward(*arguments, *extra, how={"num_sms": num_sms})
        with running(num_sms, seed=6) as found:
            assert torch.equal(out, int8_matmul(*arguments, *extra))
        (launched,) = found
        (block,) = blocks_of(found)
        assert launched.grid[0] > -(-m // block) * -(-outputs // 128)
    transposed, other = quantised(1600, outputs - 1, "channel")
    SM80.check_gradients(normal(m, 1600, seed=4, dtype=dtype), transposed, other, num_sms=num_sms)


@only_emulated
def test_ctas_fill_the_gpu_and_no_more() -> None:
    """The matmul has two tiles of 128 outputs and ten steps. A CTA takes at least two steps; two CTAs share an SM."""
    weight, scale = quantised(256, 1280, "channel")
    for num_sms, ctas in ((1, 2), (2, 4), (100, 10)):
        with running(num_sms) as found:
            int8_matmul(normal(1, 1280, seed=1), weight, scale, None, None, "none")
        assert [launched.grid[0] for launched in found] == [ctas]


@only_emulated
@pytest.mark.parametrize("num_sms", [1, 8])
@pytest.mark.parametrize("m, n, k", [(1, 256, 1280), (3, 262, 1283), (130, 66, 517)])
def test_launches_are_dealt_as_the_library_tells(m: int, n: int, k: int, num_sms: int) -> None:
    """For SwiGLU, the library is asked about gates and ups."""
    weight, scale = quantised(n, k, "channel")
    with running(num_sms) as found:
        for activation in ("none", "swiglu"):
            int8_matmul(normal(m, k, seed=1), weight, scale, None, None, activation)
        grads(normal(m, n, seed=2), weight, scale, True)
    sums = ((OP, m, n, k), (GRAD_OP, m, k, n))
    with native.forced_int8_tile(80):
        dealt = [native.int8_matmul_schedule(op, ARCH, num_sms, False, *sizes) for op, *sizes in sums]
    assert [launched.grid[0] for launched in found] == [dealt[0].ctas, dealt[0].ctas, dealt[1].ctas]
    assert blocks_of(found) == [dealt[0].block_m, dealt[0].block_m, dealt[1].block_m]


@only_emulated
def test_whole_tiles_follow_the_shared_ones() -> None:
    """Of five tiles for two resident CTAs, one is split. Of seven for four, all are: three would leave one CTA idle."""
    for num_sms, tiles, ctas in ((1, 5, 2 + 4), (2, 7, 4)):
        weight, scale = quantised(tiles * 128, 3328, "channel")
        with running(num_sms) as found:
            int8_cases.check_forward(int8_matmul, normal(3, 3328, seed=1), weight, scale)
        assert [launched.grid[0] for launched in found] == [ctas]


@only_emulated
@pytest.mark.parametrize("m", [5, 130])
def test_order_of_warps_and_copies_has_no_influence(m: int) -> None:
    weight, scale = quantised(136, 1024, 32)
    x, grad_out = normal(m, 1024, seed=1), normal(m, 136, seed=2)
    results = []
    for launching in ({"seed": 100}, {"seed": 1, "workers": 1}):
        with running(num_sms=8, **launching):
            results.append((int8_matmul(x, weight, scale, None, None, "none"), grad_input(grad_out, weight, scale)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- Values -----------------------------------------------------------------------------------------------------------


def test_swiglu_of_views() -> None:
    weight, scale = quantised(48, 128, 64)
    wide, residual = normal(2, 5, 200, seed=1), normal(2, 5, 40, seed=3)[..., 8:32]
    for x in (wide[..., :128], wide[..., 1:129], normal(5, 128, 2, seed=2).permute(2, 0, 1)):
        out = SM80.check_forward(x, weight, scale, None, residual, "swiglu")
        assert torch.equal(out, int8_matmul(x.contiguous(), weight, scale, None, residual.contiguous(), "swiglu"))
    assert SM80.check_forward(normal(128, seed=4), weight, scale, activation="swiglu").shape == (24,)
    mapped = torch.vmap(lambda x, residual: int8_matmul(x, weight, scale, None, residual, "swiglu"))
    x = wide[..., :128]
    assert torch.equal(mapped(x, residual), int8_matmul(x, weight, scale, None, residual, "swiglu"))


# --- Gradients, the dispatcher, the ops -------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("m, activation", [(3, "silu"), (3, "swiglu"), (70, "swiglu")])
def test_gradients_through_the_layer(m: int, activation: str, dtype: torch.dtype) -> None:
    """Compares forward, activation, residual and all of autograd's gradients with float64."""
    weight = fastattn.quantize_int8(normal(50, 96, seed=1, dtype=torch.float32, std=0.1), 32)
    bias, residual, _ = epilogue(activation, m, 50, dtype)
    tensors = normal(m, 96, seed=2, dtype=dtype), bias, residual
    grad_out = normal(*residual.shape, seed=5, dtype=dtype)

    def layer(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
        with fastattn.use_backend(backend):
            out = fastattn.int8_linear(leaves[0], weight, leaves[1], activation=activation, residual=leaves[2])
            out.backward(grad_out.to(dtype))
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    with running(), fastattn.record() as calls:
        found = layer(dtype, "cuda")
    name = re.compile(rf"int8_matmul_sm80<(?:{'|'.join(map(str, BLOCKS))}), {str(dtype).removeprefix('torch.')}>")
    (forward, backward) = calls
    assert forward[:2] == (OP, "cuda") and name.fullmatch(forward.kernel)
    assert (backward.op, backward.backend) == (f"{OP} backward", "cuda")
    assert backward.kernel.startswith(f"{GRAD_OP}_sm80<")
    for name, actual, oracle in zip(
        ("out", "x", "bias", "residual"), found, layer(torch.float64, "torch"), strict=True
    ):
        error = (actual.double() - oracle).abs().max() / oracle.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps, name


def test_the_two_matmuls_that_dtensor_makes_of_a_layer_run_the_kernels() -> None:
    weight = fastattn.quantize_int8(normal(50, 96, seed=1, dtype=torch.float32, std=0.1), 32)
    parameter = fastattn.nn.Int8Tensor.from_weight(weight, torch.float16)
    x, bias, grad_out = normal(5, 96, seed=2).requires_grad_(), normal(50, seed=3), normal(5, 50, seed=4)
    with running() as found, fastattn.use_backend("cuda"):
        out, expected = torch.addmm(bias, x, parameter.t()), fastattn.int8_linear(x, weight, bias)
        gradients = [torch.autograd.grad(y, x, grad_out)[0] for y in (out, expected)]
    assert torch.equal(out, expected)
    assert torch.equal(*gradients)
    assert not EMULATED or len(found) == 4


@pytest.mark.parametrize("wanted", ["both", "x", "bias"])
def test_gradients_that_are_wanted(wanted: str) -> None:
    """Each runs twice, to add to the first gradient, and under autocast: a float32 bias gets a float32 gradient."""
    weight = fastattn.Int8Weight(*quantised(48, 96, "channel"))
    x = normal(2, 9, 96, seed=1).requires_grad_(wanted != "bias")
    bias = normal(48, seed=2, dtype=torch.float32).requires_grad_(wanted != "x")
    grad_out = normal(2, 9, 48, seed=3)
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(context) for context in (running(), fastattn.record())][1]
        stack.enter_context(torch.autocast(DEVICE, torch.float16))
        for _ in range(2):
            fastattn.int8_linear(x, weight, bias).backward(grad_out)
    backward = [(call.op, call.backend, call.kernel.partition("<")[0]) for call in calls if call.op != OP]
    fused = (f"{OP} backward", "cuda", f"{GRAD_OP}_sm80")
    assert backward == ([] if wanted == "bias" else [fused] * 2)
    if wanted != "x":
        assert bias.grad is not None and bias.grad.dtype == torch.float32
        int8_cases.check_grad_bias((bias.grad / 2).half(), grad_out)
    if wanted != "bias":
        exact = grad_out.double() @ weight.dequantize(torch.float64)
        assert x.grad is not None and (x.grad / 2 - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_gradients_of_samples_are_their_own() -> None:
    """Under vmap, each sample has its own gradient of the bias."""
    weight = fastattn.Int8Weight(*quantised(24, 32, "channel"))
    x, bias, grad_out = normal(3, 5, 32, seed=1), normal(24, seed=2), normal(3, 5, 24, seed=3)

    def gradients(x: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(lambda x, bias: fastattn.int8_linear(x, weight, bias), x, bias)[1](grad_out)

    with running():
        grad_x, grad_bias = torch.vmap(gradients)(x, grad_out)
        for i in range(3):
            alone = gradients(x[i], grad_out[i])
            assert torch.equal(grad_x[i], alone[0]) and torch.equal(grad_bias[i], alone[1])


@each_dtype
@pytest.mark.parametrize("m, n", [(1, 16), (17, 16), (64, 512), (100, 512), (129, 256)])
def test_explain_names_the_tile_that_is_launched(m: int, n: int, dtype: torch.dtype) -> None:
    weight = fastattn.Int8Weight(*quantised(n, 128, "channel"))
    x = normal(m, 128, seed=1, dtype=dtype)
    with running(num_sms=2) as found:
        explained = fastattn.explain(fastattn.int8_linear, x, weight)
        fastattn.int8_linear(x, weight)
    block = explained.tile["block_m"]
    assert block in BLOCKS and blocks_of(found) == [block] * len(found)
    name = f"int8_matmul_sm80<{block}, {str(dtype).removeprefix('torch.')}>"
    assert (explained.backend, explained.kernel) == ("cuda", name)


def test_explain_says_what_is_copied() -> None:
    """A weight that quantize_int8 made is not copied; x is where its rows are not aligned."""
    dense, reason = normal(24, 40, seed=1, dtype=torch.float32), "its strides are not multiples of 16 bytes"
    x, residual = normal(3, 40, seed=2), normal(3, 24, seed=3)[:, :23]
    for weight in (fastattn.quantize_int8(dense[:23, :39]), fastattn.Int8Weight(*quantised(23, 39, "channel"))):
        explained = fastattn.explain(fastattn.int8_linear, x[:, :39], weight, residual=residual)
        own = fastattn.explain(fastattn.int8_linear, x[:, :39].contiguous(), weight)
        expected = {} if weight.data.stride(0) == 48 else {"weight": reason}
        assert (explained.backend, explained.copied) == ("cuda", expected)
        assert own.copied == {"x": reason, **expected}
        for repeated, why in (
            (x[:1, :39].expand(3, 39), "its rows share memory"),
            (x[:, None, :39].expand(3, 2, 39), "its rows have no common stride"),
        ):
            assert fastattn.explain(fastattn.int8_linear, repeated, weight).copied == {"x": why, **expected}


def test_one_graph_for_any_number_of_tokens() -> None:
    """This holds although the number of tokens decides which kernel runs."""
    weight, bias = fastattn.Int8Weight(*quantised(24, 64, 32), 32), normal(24, seed=1)

    def layer(x: Tensor) -> Tensor:
        return fastattn.int8_linear(x, weight, bias, activation="gelu")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for m in (3, 20, 130):
        x = normal(m, 64, seed=m)
        with running():
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def arguments(**changes: Any) -> dict[str, Any]:
    weight, scale = quantised(24, 64, "channel")
    return {"x": normal(5, 64, seed=1), "weight": weight, "scale": scale, "bias": None, "residual": None,
            "activation": "none", **changes}  # fmt: skip


def grad_arguments(**changes: Any) -> dict[str, Any]:
    weight, scale = quantised(24, 64, "channel")
    return {"grad_out": normal(5, 24, seed=1), "weight": weight, "scale": scale, "bias_grad": False, **changes}


def test_opcheck() -> None:
    key = "CPU" if EMULATED else "CUDA"
    groups, odd = quantised(24, 64, 32), dict(zip(("weight", "scale"), quantised(26, 39, "channel"), strict=True))
    checked = {
        OP: [
            arguments(),
            arguments(x=normal(2, 3, 64, seed=2), bias=normal(24, seed=3), activation="gelu"),
            arguments(weight=groups[0], scale=groups[1], residual=normal(5, 24, seed=4)),
            arguments(**odd, x=normal(5, 39, seed=6), bias=normal(26, seed=5), activation="swiglu"),
        ],
        GRAD_OP: [
            grad_arguments(bias_grad=True),
            grad_arguments(weight=groups[0], scale=groups[1]),
            grad_arguments(**odd, grad_out=normal(5, 26, seed=7), bias_grad=True),
        ],
    }
    for name, all_arguments in checked.items():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastattn::{name}", key)
        for each in all_arguments:
            with running():
                torch.library.opcheck(getattr(torch.ops.fastattn, name).default, (), each)


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


int8 = functools.partial(zeros, dtype=torch.int8)
fp32 = functools.partial(zeros, dtype=torch.float32)
# name: (changed arguments, words of the message)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "weight rank": ({"weight": int8(24)}, "weight must have 2 dimensions, got shape [24]"),
    "scale rank": ({"scale": fp32(24)}, "scale must have 2 dimensions, got shape [24]"),
    "columns": ({"x": zeros(5, 48)}, "x must have 64 columns (its last dim) to match weight, got [5, 48]"),
    "scalar": ({"x": zeros()}, "x must have 64 columns (its last dim) to match weight, got []"),
    "dtype": ({"x": fp32(5, 64)}, "x must be float16 or bfloat16 for the native kernel, got float32"),
    "weight dtype": ({"weight": zeros(24, 64)}, "weight must be int8, got float16"),
    "scale dtype": ({"scale": zeros(24, 1)}, "scale must be float32, got float16"),
    "scale rows": ({"scale": fp32(8, 1)}, "scale must have shape [1, 1], [24, 1] or [24, groups], got [8, 1]"),
    "groups": (
        {"scale": fp32(24, 4)},
        "scale must have a row for each row and a column for each 32, 64 or 128 columns of weight, got [24, 4]",
    ),
    "rows of groups": ({"scale": fp32(1, 2)}, "scale must have a row for each row and a column for each 32, 64 or"),
    "bias": ({"bias": zeros(23)}, "bias must have shape [24], got [23]"),
    "bias dtype": ({"bias": fp32(24)}, "bias must be float16, got float32"),
    "residual": (
        {"residual": zeros(4, 24)},
        "residual must have the leading dimensions of x and 24 columns, got [4, 24]",
    ),
    "activation": ({"activation": "tanh"}, "activation must be none, relu, gelu, gelu_tanh, silu or swiglu, got tanh"),
    "halves": (
        {"activation": "swiglu", "weight": int8(23, 64), "scale": fp32(23, 1)},
        "weight must have an even number of rows for swiglu (first gates, then ups), got [23, 64]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_the_op(name: str) -> None:
    changed, words = BAD[name]
    with pytest.raises(RuntimeError, match=re.escape(f"fastattn.{OP}: {words}")):
        getattr(torch.ops.fastattn, OP)(**arguments(**changed))


def test_bad_input_of_the_gradient() -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"fastattn.{GRAD_OP}: grad_out must have 24 columns")):
        grads(*grad_arguments(grad_out=zeros(5, 64)).values())


def test_a_raw_op_has_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        getattr(torch.ops.fastattn, OP)(**arguments(x=normal(5, 64, seed=1).requires_grad_()))


# --- What is launched -------------------------------------------------------------------------------------------------


@only_emulated
@each_granularity
@pytest.mark.parametrize("m", [1, 64, 96, 128])
def test_no_bank_conflicts_and_whole_sectors(m: int, granularity: str | int) -> None:
    weight, scale = quantised(256, 512, granularity)
    with running() as found:
        int8_matmul(normal(m, 512, seed=1), weight, scale, None, None, "none")
        int8_matmul(normal(m, 512, seed=1), weight, scale, None, None, "swiglu")
        grads(normal(m, 256, seed=2), weight, scale, True)
    assert len(found) == 3
    for launched in found:
        assert launched.report.bank_conflicts == 0
        copies = [row for row in launched.report.rows if row.opcode.startswith("cp.async.cg")]
        assert sum(row.global_bytes for row in copies) == 32 * sum(row.global_sectors for row in copies) > 0


@only_emulated
@each_dtype
def test_few_tokens_move_little_more_than_the_weight(dtype: torch.dtype) -> None:
    """Each byte of the weight moves once. With tiles' repeated reads, from L2, traffic is within 3 % of all inputs and
    outputs; for the gradient within 6 %, as it also reads scales: 4 bytes per 128 bytes of weights."""
    n, k = 512, 1024
    weight, scale = quantised(n, k, "channel")
    for matmul, width, others, allowed in ((int8_matmul, k, (None, None, "none"), 1.03), (grad_input, n, (), 1.06)):
        x = normal(1, width, seed=1, dtype=dtype)
        with running() as found:
            out = matmul(x, weight, scale, *others)
        (launched,) = found
        moved = sum(row.global_bytes for row in launched.report.rows)
        assert moved <= allowed * (weight.nbytes + scale.nbytes + x.nbytes + out.nbytes)
        copied = sum(row.global_bytes for row in launched.report.rows if row.opcode.startswith("cp.async.cg"))
        assert copied == weight.nbytes + x.nbytes * (out.numel() // 128)


@only_emulated
def test_the_launch_is_the_one_that_a_gpu_would_get() -> None:
    """A CTA has four warps, and the tensor cores do no more than the tiles' work."""
    weight, scale = quantised(256, 256, "channel")
    for m, block in ((1, 16), (40, 48), (90, 96), (128, 128)):
        with running() as found:
            int8_matmul(normal(m, 256, seed=1), weight, scale, None, None, "none")
            grad_input(normal(m, 256, seed=1), weight, scale)
        tokens = -(-m // block) * block
        for launched in found:
            assert launched.grid == (2 * tokens // block, 1, 1) and launched.block == (128, 1, 1)
            assert launched.report.shared_bytes <= 99 * 1024
            (work,) = launched.report.tensor_core.values()
            assert work.multiply_adds == tokens * 256 * 256


@only_emulated
@pytest.mark.parametrize("m", [1, 5, 16, 40])
@pytest.mark.parametrize("int8_activations", [False, True], ids=["16bit", "int8"])
def test_ctas_meet_once_where_they_share_a_tile_and_nowhere_else(int8_activations: bool, m: int) -> None:
    """Each partial is counted by one addition, which alone orders it. Up to 8 tokens, a CTA quantises all by itself."""
    weight, scale = quantised(256, 1024, "channel")
    x = normal(m, 1024, seed=1)
    for num_sms in (1, 4):  # two tiles, for two CTAs or for eight
        with device.emulated(ARCH, num_sms=num_sms), checked(seed=m), launches.recorded() as found:
            torch.ops.fastattn.int8_matmul(x, weight, scale, None, None, "none", int8_activations)
        (launched,) = found
        ordered = {
            name: count
            for name, count in launched.report.opcodes.items()
            if name.startswith(("atom", "red", "fence", "membar", "ld.acquire", "st.release"))
        }
        if int8_activations and m > 8:
            assert ordered  # the queue of tokens
        elif num_sms == 1:
            assert launched.grid[0] == 2 and not ordered
        else:
            adds = ordered.pop("atom.acq_rel.gpu.global.add.u64")
            asked, opened = ordered.pop("ld.acquire.gpu.global.b64", 0), ordered.pop("atom.relaxed.gpu.global.cas.b64")
            splits = launched.grid[0]
            assert not ordered and splits > 2 and splits <= opened <= 2 * splits
            assert asked == (splits if m > 16 else 0) and splits - (2 if m > 16 else 0) <= adds <= splits


# name: (instruction, its replacement, tokens)
FAULTS = {
    "waits for one group less": ("cp.async.wait_group 1;", "cp.async.wait_group 2;", 5),
    "no barrier": ("bar.sync 0;", "", 5),
    "arrivals tell nothing of the partials": ("atom.acq_rel.gpu", "atom.relaxed.gpu", 5),
    "asking tells nothing of the partials": ("ld.acquire.gpu", "ld.relaxed.gpu", 40),
}


@only_emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(fault: str) -> None:
    instruction, instead, m = FAULTS[fault]
    weight, scale = quantised(128 if m == 5 else 192, 1024, "channel")
    x = normal(m, 1024, seed=1)
    # One worker: the seed alone decides which CTA asks first, whatever else the machine is doing.
    how = {"num_sms": 2, "uninitialised": False, "workers": 1}
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        SM80.check_forward(x, weight, scale, how=how)
    assert caught.value.kind == "race"
    SM80.check_forward(x, weight, scale, how={"num_sms": 2})


@only_emulated
def test_sums_over_tokens_that_are_merged_too_early_are_found() -> None:
    weight, scale = quantised(128, 64, "channel")
    with cuda_runtime.replaced("atom.acq_rel.gpu", "atom.relaxed.gpu"):
        with pytest.raises(EmulatorError) as caught:
            SM80.check_gradients(normal(200, 128, seed=1), weight, scale)
        assert caught.value.kind == "race"


def test_every_instance_is_launched() -> None:
    """The tables above have exactly the tiles and dtypes that are compiled."""
    expected = sorted(itertools.product(BLOCKS, instances.DTYPES))
    for name in ("gemm_sm80", "grad_input_sm80"):
        assert instances.rows_of(f"int8_matmul/instances/{name}.cu") == expected
