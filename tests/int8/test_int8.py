"""Tests int8 weights and int8_linear on the PyTorch path: results, gradients, autocast, tracing and bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastattn
from by_hand import normal
from fastattn import InputError, reference
from fastattn.activations import ACTIVATIONS, result_columns
from fastattn.functional.int8_linear import ACTIVATION_CHOICES, int8_linear
from fastattn.functional.int8_weight import GRANULARITIES, Int8Weight, quantize_int8
from fastattn.layout import has_aligned_rows, with_aligned_rows
from kernel_device import DEVICE

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]

N, K = 48, 128


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x ``[2, 3, K]``, bias ``[N]``, residual ``[2, 3, N]``."""
    x, bias, residual = (normal(s, *shape, dtype=dtype) for s, shape in ((1, (2, 3, K)), (2, (N,)), (3, (2, 3, N))))
    return x.requires_grad_(grad), bias.requires_grad_(grad), residual.requires_grad_(grad)


def weight_of(granularity: str | int = "channel", dtype: torch.dtype = torch.float32) -> Int8Weight:
    return quantize_int8(normal(4, N, K, dtype=dtype), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_gives_a_weight_that_comes_back(granularity: str | int) -> None:
    original = torch.nn.Parameter(normal(4, N, K, dtype=torch.float32))
    weight = quantize_int8(original, granularity)
    groups = {"tensor": (1, 1), "channel": (N, 1)}.get(str(granularity), (N, K // 32))
    if isinstance(granularity, int):
        groups = (N, K // granularity)
    assert weight.shape == (N, K)
    assert (weight.data.dtype, weight.scale.dtype, tuple(weight.scale.shape)) == (torch.int8, torch.float32, groups)
    assert not weight.scale.requires_grad
    assert weight.nbytes == N * K + 4 * weight.scale.numel()
    assert weight.device == torch.device("cpu")
    half_a_step = weight.scale.max().item() * 0.5001
    torch.testing.assert_close(weight.dequantize(), original.detach(), atol=half_a_step, rtol=0)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert repr(granularity) in repr(weight)


def test_a_transposed_weight_is_quantised_as_its_copy() -> None:
    transposed = normal(4, K, N, dtype=torch.float32).t()
    for granularity in GRANULARITIES:
        actual, expected = quantize_int8(transposed, granularity), quantize_int8(transposed.contiguous(), granularity)
        assert actual.data.is_contiguous()
        assert torch.equal(actual.data, expected.data)
        assert torch.equal(actual.scale, expected.scale)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("rows, columns", [(5, 39), (6, 40), (7, 1), (0, 7), (7, 0), (4, 16)])
def test_rows_start_at_multiples_of_16_bytes(rows: int, columns: int, granularity: str, tmp_path: Any) -> None:
    """This survives copying, saving and moving the weight. Zeros follow each row."""
    dense = normal(4, rows, columns, dtype=torch.float32)
    weight = quantize_int8(dense, granularity)
    torch.save(weight, tmp_path / "weight.pt")
    for other in (weight, copy.deepcopy(weight), torch.load(tmp_path / "weight.pt"), weight.to("meta")):
        assert other.data.numel() == 0 or other.data.stride() == (-(-columns // 16) * 16, 1)
    expected, _ = reference.quantize_int8(dense, granularity)
    assert torch.equal(weight.data, expected)
    assert weight.data.untyped_storage().nbytes() == rows * -(-columns // 16) * 16
    if weight.data.numel() > 0:
        behind = weight.data.as_strided((rows, -columns % 16), (weight.data.stride(0), 1), columns)
        assert not behind.any()


@pytest.mark.parametrize("columns", [16, 24])
def test_rows_that_share_memory_get_their_own(columns: int) -> None:
    for shared in (torch.ones(1, columns).expand(4, columns), torch.arange(100.0).as_strided((4, columns), (8, 1))):
        rows = with_aligned_rows(shared)
        assert has_aligned_rows(rows) and rows.stride(0) >= columns and torch.equal(rows, shared)


def test_a_weight_moves_copies_and_is_saved(tmp_path: Any) -> None:
    weight = weight_of(32)
    assert weight.to("cpu") is weight
    assert weight.to("meta").device.type == "meta"
    torch.save(weight, tmp_path / "weight.pt")
    for other in (copy.deepcopy(weight), torch.load(tmp_path / "weight.pt")):
        assert other.granularity == 32
        assert torch.equal(other.data, weight.data)
        assert torch.equal(other.scale, weight.scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel", 64])
@pytest.mark.parametrize("activation", ACTIVATION_CHOICES)
def test_int8_linear_is_the_float_layer(activation: str | None, granularity: str | int, dtype: torch.dtype) -> None:
    x, bias, residual = inputs(dtype)
    residual = residual[..., : result_columns(activation, N)]
    weight = weight_of(granularity)
    y = int8_linear(x, weight, bias, activation=activation, residual=residual)
    wide = torch.promote_types(dtype, torch.float32)
    product = F.linear(x.to(wide), weight.dequantize(wide), bias.to(wide))
    expected = ACTIVATIONS[activation or "none"](product) + residual.to(wide)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype))


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (5, K), (2, 3, 4, K)], ids=str)
def test_leading_dims(shape: tuple[int, ...]) -> None:
    x, weight = normal(1, *shape, dtype=torch.float32), weight_of()
    torch.testing.assert_close(int8_linear(x, weight), F.linear(x, weight.dequantize()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_inputs(layout: torch.layout) -> None:
    # In float64, as matmuls of other sizes round sums in another order.
    parts, weight, bias = [normal(s, s, K) for s in (2, 5)], weight_of(), inputs(torch.float64)[1]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    y = int8_linear(nested, weight, bias, activation="gelu", residual=int8_linear(nested, weight))
    for actual, part in zip(y.unbind(), parts, strict=True):
        expected = int8_linear(part, weight, bias, activation="gelu", residual=int8_linear(part, weight))
        torch.testing.assert_close(actual, expected)
    gated = int8_linear(nested, weight, bias, activation="swiglu")
    for actual, part in zip(gated.unbind(), parts, strict=True):
        torch.testing.assert_close(actual, int8_linear(part, weight, bias, activation="swiglu"))
    with pytest.raises(InputError, match="input_precision: expected '16bit' for a nested x, got 'int8'"):
        int8_linear(nested, weight, input_precision="int8")


@pytest.mark.parametrize("input_precision", ["16bit", "int8"])
def test_gradients_are_those_of_the_float_layer(input_precision: str) -> None:
    weight = weight_of(32)
    leaves = inputs(torch.float64, grad=True)
    grad = normal(5, 2, 3, N)
    y = int8_linear(
        leaves[0], weight, leaves[1], activation="silu", residual=leaves[2], input_precision=input_precision
    )
    actual = torch.autograd.grad(y, leaves, grad)
    x = leaves[0]
    if input_precision == "int8":
        quantized, scale = reference.quantize_rows(x)
        x = x + (quantized * scale[..., None] - x).detach()
    expected_y = F.silu(F.linear(x, weight.dequantize(torch.float64), leaves[1])) + leaves[2]
    expected = torch.autograd.grad(expected_y, leaves, grad)
    for a, e in zip((y, *actual), (expected_y, *expected), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("input_precision", ["16bit", "int8"])
def test_gradients_of_swiglu_are_those_of_the_float_layers(input_precision: str) -> None:
    """The gate's rows come first, as in ``gate_up_proj``."""
    weight = weight_of(32)
    x, bias, residual = (t.detach().requires_grad_() for t in (*inputs(torch.float64)[:2], normal(6, 2, 3, N // 2)))
    grad = normal(5, 2, 3, N // 2)
    y = int8_linear(x, weight, bias, activation="swiglu", residual=residual, input_precision=input_precision)
    actual = torch.autograd.grad(y, (x, bias, residual), grad)
    z = x
    if input_precision == "int8":
        quantized, scale = reference.quantize_rows(x)
        z = x + (quantized * scale[..., None] - x).detach()
    (gate, up), (gate_bias, up_bias) = weight.dequantize(torch.float64).chunk(2), bias.chunk(2)
    expected_y = F.silu(F.linear(z, gate, gate_bias)) * F.linear(z, up, up_bias) + residual
    expected = torch.autograd.grad(expected_y, (x, bias, residual), grad)
    for a, e in zip((y, *actual), (expected_y, *expected), strict=True):
        torch.testing.assert_close(a, e)


def test_any_subset_may_need_gradients() -> None:
    for needing in range(1, 8):
        leaves = [leaf.requires_grad_(bool(needing >> i & 1)) for i, leaf in enumerate(inputs())]
        y = int8_linear(leaves[0], weight_of(), leaves[1], activation="gelu", residual=leaves[2])
        y.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [leaf.requires_grad for leaf in leaves]


def test_int8_activations_lose_what_int8_loses() -> None:
    x, weight = inputs(torch.float64)[0], weight_of()
    exact = int8_linear(x, weight)
    rounded = int8_linear(x, weight, input_precision="int8")
    step = x.abs().amax(-1, keepdim=True) / 127
    bound = step / 2 * weight.dequantize(torch.float64).abs().sum(1)
    assert not torch.equal(rounded, exact)
    assert bool(((rounded - exact).abs() <= bound).all())


def test_autocast_is_that_of_linear() -> None:
    weight = weight_of()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, bias, residual = inputs(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = int8_linear(x, weight, bias, residual=residual)
            like = F.linear(x, weight.dequantize(dtype), bias)
        assert y.dtype == like.dtype
        cast = (t.to(like.dtype) for t in (x, bias, residual))
        expected = int8_linear(next(cast), weight, next(cast), residual=next(cast))
        assert torch.equal(y, expected)


def test_it_compiles_and_exports_with_the_weight_as_argument() -> None:
    x, bias, residual = inputs()
    weight = weight_of()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Int8Weight, bias: Tensor, residual: Tensor) -> Tensor:
            return int8_linear(x, weight, bias, activation="gelu", residual=residual)

    expected = Layer()(x, weight, bias, residual)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x, weight, bias, residual), expected)
    torch.testing.assert_close(compiled(x[:, :2], weight, bias, residual[:, :2]), expected[:, :2])
    exported = torch.export.export(Layer(), (x, weight, bias, residual)).module()
    torch.testing.assert_close(exported(x, weight, bias, residual), expected)


def test_torch_func() -> None:
    x, bias, _ = inputs(torch.float64)
    weight = weight_of()
    mapped = torch.vmap(lambda row: int8_linear(row, weight, bias, activation="silu"))(x)
    torch.testing.assert_close(mapped, int8_linear(x, weight, bias, activation="silu"))
    grads = torch.vmap(torch.func.grad(lambda row: int8_linear(row, weight, bias).square().sum()))(x[0])
    expected = [torch.func.grad(lambda row: int8_linear(row, weight, bias).square().sum())(row) for row in x[0]]
    torch.testing.assert_close(grads, torch.stack(expected))


def test_checkpointing_gives_the_same_gradients() -> None:
    weight = weight_of()
    grads = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        x, bias, _ = inputs(grad=True)
        wrap(lambda x, b=bias: int8_linear(x, weight, b, activation="gelu"), x).sum().backward()
        assert x.grad is not None
        assert bias.grad is not None
        grads.append((x.grad, bias.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_explain_names_the_path() -> None:
    explanation = fastattn.explain(int8_linear, inputs()[0], weight_of(), input_precision="int8")
    assert explanation.backend == "torch"
    assert set(explanation.rejected) == {"cuda", "triton"}


def test_kernels_refuse_int8_activations_and_say_so() -> None:
    x, weight = inputs(torch.float16)[0].to(DEVICE), weight_of().to(DEVICE)
    with fastattn.use_backend("triton"), pytest.raises(InputError, match="do not have: int8 activations"):
        int8_linear(x, weight, input_precision="int8")


def q(**changes: Any) -> dict[str, Any]:
    return {"weight": torch.zeros(N, K), **changes}


def weight_parts(**changes: Any) -> dict[str, Any]:
    return {"data": torch.zeros(N, K, dtype=torch.int8), "scale": torch.ones(N, 1), "granularity": "channel", **changes}


def linear(**changes: Any) -> dict[str, Any]:
    return {"x": torch.zeros(3, K), "weight": weight_of(), **changes}


# name: (function, arguments, words of the message: argument, expected, came)
WRONG_TYPES: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "no tensor": (quantize_int8, q(weight=[[1.0]]), ("weight", "torch.Tensor", "list")),
    "scale missing": (Int8Weight, weight_parts(scale=None), ("scale", "torch.Tensor", "NoneType")),
    "weight type": (int8_linear, linear(weight=torch.zeros(N, K)), ("weight", "Int8Weight", "Tensor")),
    "x type": (int8_linear, linear(x=1.0), ("x", "torch.Tensor", "float")),
    "weight of int8 numbers": (
        int8_linear,
        linear(weight=torch.zeros(N, K, dtype=torch.int8)),
        ("weight", "pass fastattn.Int8Weight(data, scale, granularity)"),
    ),
    "weight is a layer": (int8_linear, linear(weight=fastattn.nn.Int8Linear(K, N)), ("pass weight.int8_weight",)),
    "weight is quantised": (quantize_int8, q(weight=weight_of()), ("weight", "floating", "dequantize()")),
    "parameter is quantised": (quantize_int8, q(weight=fastattn.nn.Int8Linear(K, N).weight), ("dequantize()",)),
    "bias type": (int8_linear, linear(bias=0.0), ("bias", "torch.Tensor", "float")),
    "activation type": (int8_linear, linear(activation=F.relu), ("activation", "'relu'", "function")),
    "input precision type": (int8_linear, linear(input_precision=8), ("input_precision", "'16bit'", "int 8")),
    "dequantize type": (weight_of().dequantize, {"dtype": "half"}, ("dtype", "torch.dtype", "str")),
    "to a dtype": (weight_of().to, {"device": torch.float16}, ("device", "float16", "dequantize")),
}
WRONG_VALUES: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "integer": (quantize_int8, q(weight=torch.zeros(N, K).int()), ("weight", "float32", "int32")),
    "int8 numbers": (
        quantize_int8,
        q(weight=torch.zeros(N, K, dtype=torch.int8)),
        ("weight", "floating", "torch.int8; if it is quantised already, pass fastattn.Int8Weight(data, scale"),
    ),
    "rank": (quantize_int8, q(weight=torch.zeros(K)), ("weight", "[N, K]", "[128]")),
    "granularity name": (quantize_int8, q(granularity="row"), ("granularity", "'channel'", "'row'")),
    "granularity size": (quantize_int8, q(granularity=16), ("granularity", "32", "16")),
    "granularity bool": (quantize_int8, q(granularity=True), ("granularity", "32", "True")),
    "group": (quantize_int8, q(weight=torch.zeros(N, 96), granularity=64), ("granularity", "K = 96", "64")),
    "data dtype": (Int8Weight, weight_parts(data=torch.zeros(N, K)), ("data", "int8", "float32")),
    "data rank": (Int8Weight, weight_parts(data=torch.zeros(K, dtype=torch.int8)), ("data", "[N, K]", "[128]")),
    "data layout": (
        Int8Weight,
        weight_parts(data=torch.zeros(K, N, dtype=torch.int8).t()),
        ("data", "contiguous", "(1, 48)"),
    ),
    "scale shape": (Int8Weight, weight_parts(scale=torch.ones(N)), ("scale", "[48, 1]", "[48]")),
    "scale dtype": (Int8Weight, weight_parts(scale=torch.ones(N, 1).half()), ("scale", "float32", "float16")),
    "scale device": (Int8Weight, weight_parts(scale=torch.ones(N, 1, device="meta")), ("scale", "cpu", "meta")),
    "x dtype": (int8_linear, linear(x=torch.zeros(3, K).int()), ("x", "float32", "int32")),
    "x shape": (int8_linear, linear(x=torch.zeros(3, 64)), ("x", "K = 128", "[3, 64]; the weight [N, K] is [48, 128]")),
    "x scalar": (int8_linear, linear(x=torch.zeros(())), ("x", "[..., K]", "[]")),
    "weight device": (int8_linear, linear(weight=weight_of().to("meta")), ("weight", "cpu", "meta")),
    "bias shape": (int8_linear, linear(bias=torch.zeros(K)), ("bias", "[48]", "[128]")),
    "bias dtype": (
        int8_linear,
        linear(bias=torch.zeros(N).half()),
        ("bias", "the dtype of x, torch.float32", "torch.float16; pass x.to(torch.float16), or"),
    ),
    "bias device": (int8_linear, linear(bias=torch.zeros(N, device="meta")), ("bias", "cpu", "meta")),
    "residual shape": (int8_linear, linear(residual=torch.zeros(N)), ("residual", "[3, 48]", "[48]")),
    "residual dtype": (int8_linear, linear(residual=torch.zeros(3, N).half()), ("residual", "32", "16")),
    "swiglu rows": (
        int8_linear,
        linear(weight=quantize_int8(torch.zeros(9, K)), activation="swiglu"),
        ("weight", "an even N for 'swiglu'", "gate", "N = 9"),
    ),
    "swiglu bias": (
        int8_linear,
        linear(bias=torch.zeros(N // 2), activation="swiglu"),
        ("bias", "[N]", "[48]", "[24]"),
    ),
    "swiglu residual": (
        int8_linear,
        linear(residual=torch.zeros(3, N), activation="swiglu"),
        ("residual", "[..., N / 2]", "[3, 24]", "[3, 48]"),
    ),
    "activation name": (int8_linear, linear(activation="tanh"), ("activation", "'silu'", "'tanh'")),
    "input precision name": (int8_linear, linear(input_precision="8bit"), ("input_precision", "'int8'", "'8bit'")),
    "dequantize dtype": (weight_of().dequantize, {"dtype": torch.int32}, ("dtype", "float32", "int32")),
}


@pytest.mark.parametrize("case", [*WRONG_TYPES, *WRONG_VALUES])
def test_bad_input_is_refused(case: str) -> None:
    kind = TypeError if case in WRONG_TYPES else InputError
    function, arguments, words = (WRONG_TYPES | WRONG_VALUES)[case]
    for _ in range(2):  # a refused call must not be remembered as checked
        with pytest.raises(kind) as caught:
            function(**arguments)
        assert type(caught.value) is kind
        for word in words:
            assert word in str(caught.value)


def test_fastattn_check_finds_what_lies_in_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of()
    weight.scale[7] = float("nan")
    bad = torch.zeros(N, K).index_fill(0, torch.tensor([1]), float("inf"))
    assert int8_linear(torch.zeros(3, K), weight).isnan().any()
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(InputError, match=r"weight\.scale: expected finite scales, got NaN"):
        int8_linear(torch.zeros(3, K), weight)
    with pytest.raises(InputError, match="weight: expected finite values, got NaN or infinity"):
        quantize_int8(bad)
