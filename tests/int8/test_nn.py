"""Tests Int8Linear and quantize_model: a drop-in for nn.Linear, and what quantisation does to a model's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import fastattn
from by_hand import normal
from fastattn import InputError
from fastattn.functional.int8_linear import int8_linear
from fastattn.functional.int8_weight import GRANULARITIES, quantize_int8
from fastattn.nn import Int8Linear, plain_state_dict, quantize_model


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    torch.manual_seed(0)
    with fastattn.use_backend("torch"):
        yield


class Block(nn.Module):
    """A module of two layers, an activation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def rows(*shape: int) -> Tensor:
    return normal(1, *shape, dtype=torch.float32)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == state.keys()
    for name, tensor in state.items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_from_linear_is_int8_linear(granularity: str | int, bias: bool) -> None:
    linear = nn.Linear(128, 48, bias=bias)
    layer = Int8Linear.from_linear(linear, granularity)
    weight = quantize_int8(linear.weight, granularity)
    x = rows(2, 3, 128)
    assert torch.equal(layer(x), int8_linear(x, weight, linear.bias))
    assert layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.granularity) == (128, 48, granularity)
    assert torch.equal(layer.int8_weight.dequantize(), weight.dequantize())
    assert [name for name, _ in layer.named_parameters()] == (["weight", "bias"] if bias else ["weight"])
    assert list(layer.named_buffers()) == []
    assert sum(parameter.numel() for parameter in layer.parameters()) == sum(p.numel() for p in linear.parameters())
    assert repr(layer) == (f"Int8Linear(in_features=128, out_features=48, bias={bias}, granularity={granularity!r})")


@pytest.mark.parametrize("granularity", ["tensor", "channel", 32])
def test_state_dict_round_trips(granularity: str | int, tmp_path: Any) -> None:
    layer = Int8Linear.from_linear(nn.Linear(64, 48), granularity)
    x, state = rows(3, 64), bits(layer)
    save_file(plain_state_dict(layer.state_dict()), tmp_path / "layer.safetensors")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    before = {"weight": layer.weight.int8_data.contiguous(), "weight_scale": layer.weight_scale, "bias": layer.bias}
    for loaded in (load_file(tmp_path / "layer.safetensors"), torch.load(tmp_path / "layer.pt"), before):
        for assign in (False, True):
            other = Int8Linear(64, 48, granularity=granularity)
            other.load_state_dict(loaded, assign=assign)
            assert_same_state(other, state)
            assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("features", [39, 40, 1])
def test_rows_stay_aligned_and_state_dicts_contiguous(features: int, tmp_path: Any) -> None:
    """Rows start at multiples of 16 bytes, which kernels read in place, after all operations on a layer."""
    layer = Int8Linear.from_linear(nn.Linear(features, 5))
    x, state = rows(3, features), bits(layer)

    def check(other: Int8Linear, is_loaded: bool = True) -> None:
        assert other.weight.int8_data.stride() == (-(-features // 16) * 16, 1)
        if is_loaded:
            assert_same_state(other, state)
            assert torch.equal(other(x), layer(x))

    assert all(tensor.is_contiguous() for tensor in plain_state_dict(layer.state_dict()).values())
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    save_file(plain_state_dict(layer.state_dict()), tmp_path / "layer.safetensors")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    for assign in (False, True):
        other = Int8Linear(features, 5)
        check(other, is_loaded=False)
        other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
        check(other)
        other = Int8Linear(features, 5)
        other.load_state_dict(torch.load(tmp_path / "layer.pt"), assign=assign)
        check(other)
    check(layer)
    check(copy.deepcopy(layer))
    check(copy.deepcopy(layer)._apply(torch.clone))
    check(copy.deepcopy(layer).double().float())
    skeleton = Int8Linear(features, 5, device="meta")
    check(skeleton, is_loaded=False)
    check(skeleton.to_empty(device="cpu"), is_loaded=False)
    skeleton.load_state_dict(layer.state_dict())
    check(skeleton)


def test_a_float_state_dict_is_quantised_as_it_is_loaded() -> None:
    linear = nn.Linear(64, 48)
    layer = Int8Linear(64, 48, granularity=32)
    layer.load_state_dict(linear.state_dict())
    assert_same_state(layer, bits(Int8Linear.from_linear(linear, 32)))
    before = bits(layer)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(nn.Linear(32, 48).state_dict())
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="granularity: expected 32, got 64"):
            layer.load_state_dict(Int8Linear(64, 48, granularity=64).state_dict(), assign=assign)
        with pytest.raises(RuntimeError, match=r"scale: expected shape for granularity 32 = \[48, 2\], got \[48, 1\]"):
            layer.load_state_dict(plain_state_dict(Int8Linear(64, 48, granularity=64).state_dict()), assign=assign)
        missing = "weight_scale: expected the scales of the int8 weight in the same state dict, got none"
        with pytest.raises(RuntimeError, match=missing) as no:
            layer.load_state_dict({"weight": layer.weight.int8_data, "bias": linear.bias}, assign=assign)
        assert "Missing key" not in str(no.value)
        with pytest.raises(RuntimeError, match=r"weight: expected torch\.float16 or .*, got torch\.uint8"):
            layer.load_state_dict({"weight": layer.weight.int8_data.view(torch.uint8)}, strict=False, assign=assign)
        assert torch.equal(layer.weight, before["weight"])


def test_casts_and_moves_leave_the_weight_int8_with_float32_scales() -> None:
    layer = Int8Linear.from_linear(nn.Linear(64, 48))
    weight, scale = layer.weight.int8_data.clone(), layer.weight_scale.clone()
    x = rows(3, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
        layer.to(dtype)
        assert torch.equal(layer.weight.int8_data, weight)
        assert layer.weight.dtype == dtype
        assert layer.weight_scale.dtype == torch.float32
        assert torch.equal(layer.weight_scale, scale)
        assert layer(x.to(dtype)).dtype == dtype
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    layer.share_memory()
    assert layer.weight.is_shared() and layer.bias.is_shared()
    assert layer.to("meta").weight.is_meta
    assert layer.to_empty(device="cpu").weight.device.type == "cpu"


def test_autocast_is_that_of_linear() -> None:
    linear = nn.Linear(64, 48)
    layer = Int8Linear.from_linear(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(rows(3, 64)).dtype == linear(rows(3, 64)).dtype == torch.bfloat16
        torch.testing.assert_close(layer(rows(3, 64)), linear(rows(3, 64)), atol=0.05, rtol=0.05)
    with pytest.raises(RuntimeError):
        layer(rows(3, 64).half())  # fails like nn.Linear without autocast


def test_gradients_reach_inputs_and_biases_through_checkpoints() -> None:
    linear = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    model = copy.deepcopy(linear)
    quantize_model(model)
    for float_layer, layer in zip(linear, model, strict=True):
        if isinstance(float_layer, nn.Linear) and isinstance(layer, Int8Linear):
            float_layer.weight = nn.Parameter(layer.int8_weight.dequantize(), requires_grad=False)
    gradients = []
    cases: tuple[tuple[nn.Sequential, bool | None], ...]
    cases = ((linear, None), (model, None), (model, False), (model, True))
    for network, reentrant in cases:
        network.zero_grad()
        x = rows(5, 64).requires_grad_()
        y = network(x) if reentrant is None else checkpoint(network, x, use_reentrant=reentrant)
        y.square().sum().backward()
        biases = [parameter.grad for name, parameter in network.named_parameters() if name.endswith("bias")]
        assert len(biases) == 2
        gradients.append([x.grad, *(None if grad is None else grad.clone() for grad in biases)])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


def test_it_compiles_and_exports() -> None:
    model = Block()
    quantize_model(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = rows(5, 64).requires_grad_()
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(model(x).sum(), x))
    exported = torch.export.export(model, (x.detach(),))
    torch.testing.assert_close(exported.module()(x.detach()), model(x.detach()))
    for changed in (model.to("cpu"), model._apply(torch.clone), model.double()):  # the graph has guards on the weights
        y = x.detach().to(next(changed.up.parameters()).dtype)
        torch.testing.assert_close(compiled(y), changed(y))


def test_a_linear_layer_that_loads_an_int8_weight_computes_with_it() -> None:
    """It never takes the int8 values for the weight's values."""
    layer = Int8Linear.from_linear(nn.Linear(64, 48))
    x = rows(3, 64)
    for strict in (False, True):
        linear = nn.Linear(64, 48)
        linear.load_state_dict(layer.state_dict(), strict=strict)
        assert torch.equal(linear.weight, layer.weight.dequantize())
        assert linear.weight.requires_grad
        linear.load_state_dict(layer.state_dict(), strict=strict, assign=True)
        assert torch.equal(linear(x), layer(x))
        with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[1, 48, 64\]"):
            linear.load_state_dict(plain_state_dict(layer.state_dict()), strict=strict)


def test_a_quantised_transformers_model_never_comes_back_as_garbage(tmp_path: Any) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    quantize_model(model)
    with pytest.raises(InputError) as caught:
        model.save_pretrained(tmp_path / "refused")
    for words in ("int8 weights", "save_pretrained", "torch.save(model.state_dict()", "plain_state_dict"):
        assert words in str(caught.value)
    with pytest.raises(OSError, match="no file named model"):
        LlamaForCausalLM.from_pretrained(tmp_path / "refused")
    plain = plain_state_dict(model.state_dict())
    model.save_pretrained(tmp_path / "plain", state_dict=plain)
    with pytest.raises(RuntimeError, match="mismatch"):
        LlamaForCausalLM.from_pretrained(tmp_path / "plain")

    other = LlamaForCausalLM(config)
    quantize_model(other)
    other.load_state_dict(load_file(tmp_path / "plain" / "model.safetensors"))
    assert_same_state(other, model.state_dict())


@pytest.mark.parametrize("granularity", ["tensor", "channel", 64])
def test_quantize_model_replaces_and_reports(granularity: str | int) -> None:
    model = nn.Sequential(Block(), nn.LayerNorm(64), Block()).eval()
    x = rows(5, 64)
    before, size = model(x), sum(p.nbytes for p in model.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    report = quantize_model(model, granularity)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.LayerNorm, Block, Int8Linear}
    assert not any(module.training for module in model.modules())
    assert [layer.name for layer in report.layers] == ["0.up", "0.down", "2.up", "2.down"]
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, Int8Linear)
        assert layer.shape == tuple(module.weight.shape)
        assert layer.granularity == module.granularity == granularity
        assert 0.001 < layer.relative_error < 0.01  # uniform weights: (1 / 127) / sqrt(12) * sqrt(3) = 0.4 %
        assert layer.bytes_before == 4 * 64 * 128
        assert layer.bytes_after == 64 * 128 + module.weight_scale.nbytes
    assert report.skipped == {}
    assert report.bytes_before == size
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for words in ("0.up", "128 x 64", str(granularity), "4 layers", "whole model"):
        assert words in str(report)
    torch.testing.assert_close(model(x), before, atol=0.05, rtol=0)
    assert not torch.equal(model(x), before)
    assert quantize_model(model, granularity).layers == []


def test_the_filter_sees_linear_layers_and_their_names() -> None:
    model = nn.Sequential(Block(), nn.LayerNorm(64), Block())
    seen: list[tuple[str, nn.Module]] = []

    def only_down(name: str, module: nn.Module) -> bool:
        seen.append((name, module))
        return name.endswith("down")

    expected = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    report = quantize_model(model, filter=only_down)
    assert seen == expected
    assert [layer.name for layer in report.layers] == ["0.down", "2.down"]


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    report = quantize_model(model)
    assert model["a"] is model.get_submodule("b.0")
    assert [layer.name for layer in report.layers] == ["a"]


def test_layers_of_one_weight_share_one_int8_weight(tmp_path: Any) -> None:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    model[1].weight = model[0].weight
    report = quantize_model(model)
    assert [layer.bytes_before for layer in report.layers] == [4 * 64 * 64, 0]

    def is_shared(model: Any) -> bool:
        return model[0].weight is model[1].weight

    assert is_shared(model)
    assert is_shared(model.half())
    assert is_shared(model.float())
    assert is_shared(model._apply(torch.clone))  # new memory for all tensors, like a move to another device
    assert is_shared(copy.deepcopy(model))
    assert model[0].bias is not model[1].bias
    state = bits(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 2 * 64 * 64
    other = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    quantize_model(other)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same_state(other, state)


@pytest.mark.parametrize("columns", [32, 20])
def test_a_shared_weight_is_shared_in_state_dicts(columns: int, tmp_path: Any) -> None:
    """All layers save one copy and load one copy, also where rows have padding."""
    weight = fastattn.quantize_int8(torch.randn(24, columns, generator=torch.Generator().manual_seed(1)))

    def layers() -> nn.ModuleList:
        return nn.ModuleList([Int8Linear.from_weight(weight), Int8Linear.from_weight(weight)])

    def is_shared(first: Tensor, second: Tensor) -> bool:
        return first.data_ptr() == second.data_ptr()

    model = layers()
    plain = plain_state_dict(model.state_dict())
    assert is_shared(plain["0.weight"], plain["1.weight"]) and plain["0.weight"].is_contiguous()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for state in (plain, model.state_dict(), torch.load(tmp_path / "model.pt")):
        other = nn.ModuleList([Int8Linear(columns, 24, bias=False), Int8Linear(columns, 24, bias=False)])
        other.load_state_dict(state, assign=True)
        assert is_shared(other[0].weight.int8_data, other[1].weight.int8_data)
        assert torch.equal(other[0].weight.int8_data, weight.data)
        assert other[0].weight.int8_data.stride(0) % 16 == 0
    model[0].weight.int8_data.copy_(-weight.data)
    assert torch.equal(model.state_dict()["1.weight"], model[0].weight)


class TiedModel(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens)))
        return logits


def test_a_weight_tied_to_an_embedding_stays_unless_asked_for() -> None:
    model = TiedModel()
    report = quantize_model(model)
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight
    assert list(report.skipped) == ["head"]
    assert "embed.weight" in report.skipped["head"]
    assert "head stays: its weight is also embed.weight" in str(report)

    report = quantize_model(model, include_tied=True)
    assert [layer.name for layer in report.layers] == ["head"]
    assert isinstance(model.head, Int8Linear)
    assert model.embed.weight.is_floating_point()
    assert model(torch.arange(5)).shape == (5, 100)


def test_a_weight_tied_to_a_layer_that_the_filter_leaves_stays() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    report = quantize_model(model, filter=lambda name, _: name == "a")
    assert report.layers == []
    assert "b.weight" in report.skipped["a"]


def test_what_others_reach_into_stays() -> None:
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(64, 4), "gpt": Conv1D(64, 64), "hooked": hooked, "normed": normed}
    )
    types = {name: type(module) for name, module in model.named_modules()}
    with pytest.warns(UserWarning, match="quantize_model: No layer was replaced"):
        report = quantize_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert report.layers == []
    assert set(report.skipped) == {"attention.out_proj", "gpt", "hooked", "normed"}
    assert "hooks" in report.skipped["hooked"]
    assert "NonDynamicallyQuantizableLinear" in report.skipped["attention.out_proj"]


def test_what_looks_like_a_linear_layer_is_reported() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 32, 16
            self.weight = nn.Parameter(torch.zeros(16, 32))

    model = nn.ModuleDict({"gpt": Conv1D(48, 64), "own": Dense(), "embedding": nn.Embedding(16, 32)})
    model["linear"] = nn.Linear(32, 32)
    report = quantize_model(model)
    assert [layer.name for layer in report.layers] == ["linear"]
    assert set(report.skipped) == {"gpt", "own"}
    assert "gpt stays: it is a Conv1D, whose weight is [in, out]" in str(report)
    assert "own stays: it is a Dense, which is not an nn.Linear" in str(report)
    del model["linear"]
    with pytest.warns(UserWarning, match="No layer was replaced"):
        assert str(quantize_model(model)).startswith("No layer was replaced.\ngpt stays")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
def test_transformer_encoders_leave_their_fused_path(masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = rows(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    with torch.no_grad():
        before = model(x, src_key_padding_mask=mask)
        report = quantize_model(model)
        after = model(x, src_key_padding_mask=mask)
    assert len(report.layers) == 4
    difference = (after - before)[0] if masked else after - before
    assert 0 < difference.abs().max().item() < 0.05


def test_a_model_on_the_meta_device_is_ready_to_be_loaded() -> None:
    model = Block()
    with torch.device("meta"):
        skeleton = Block()
    quantize_model(skeleton)
    quantize_model(model)
    skeleton.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(skeleton(rows(3, 64)), model(rows(3, 64)))


def test_a_group_that_does_not_fit_leaves_the_model_alone() -> None:
    model = nn.ModuleDict({"fits": nn.Linear(128, 64), "fits_not": nn.Linear(100, 64)})
    before = bits(model)
    with pytest.raises(InputError) as caught:
        quantize_model(model, 64)
    for words in ("granularity", "K = 100", "64", "fits_not", "filter"):
        assert words in str(caught.value)
    assert type(model["fits"]) is nn.Linear
    assert_same_state(model, before)
    assert len(quantize_model(model, 64, filter=lambda name, _: name == "fits").layers) == 1


def test_a_weight_that_is_not_int8_is_named() -> None:
    layer = Int8Linear(4, 3, input_precision="int8")
    layer.weight = nn.Parameter(rows(3, 4))
    advice = r"make the layer with Int8Linear\.from_weight\(fastattn\.quantize_int8\(layer\.weight\), layer\.bias\)"
    for attribute in ("int8_weight", "weight_scale"):
        with pytest.raises(InputError, match=f"weight: expected an Int8Tensor, got a Parameter of .*; {advice}"):
            getattr(layer, attribute)
    with pytest.raises(InputError, match="input_precision: expected '16bit' for a weight that is sharded or not int8"):
        layer(rows(2, 4))
    again = Int8Linear.from_weight(fastattn.quantize_int8(layer.weight), layer.bias)
    assert again.int8_weight.data.dtype == torch.int8


# name: (function, arguments, error type, words of the message: argument, expected, came)
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "layers to leave out": (
        quantize_model,
        {"model": Block(), "modules_to_not_convert": ["lm_head"]},
        TypeError,
        ("quantize_model() got", "'modules_to_not_convert'; pass filter=lambda name, module:"),
    ),
    "layers to exclude": (
        quantize_model,
        {"model": Block(), "exclude": ["lm_head"]},
        TypeError,
        ("'exclude'; pass filter=lambda name, module:",),
    ),
    "group_size": (
        quantize_model,
        {"model": Block(), "group_size": 32},
        TypeError,
        ("'group_size'; it is called 'granularity' here",),
    ),
    "model type": (quantize_model, {"model": "bert"}, TypeError, ("model", "nn.Module", "str")),
    "model is the layer": (quantize_model, {"model": nn.Linear(4, 4)}, InputError, ("model", "Linear", "from_linear")),
    "model is int8": (quantize_model, {"model": Int8Linear(4, 4)}, InputError, ("model", "such a layer: Int8Linear")),
    "linear is int8": (Int8Linear.from_linear, {"linear": Int8Linear(4, 4)}, TypeError, ("linear", "Int8Linear")),
    "weight type": (
        Int8Linear.from_weight,
        {"weight": torch.zeros(4, 4)},
        TypeError,
        ("weight", "Int8Weight", "Tensor"),
    ),
    "granularity": (quantize_model, {"model": Block(), "granularity": 16}, InputError, ("granularity", "32", "16")),
    "filter": (quantize_model, {"model": Block(), "filter": "up"}, TypeError, ("filter", "callable", "str")),
    "input_precision": (quantize_model, {"model": Block(), "input_precision": 8}, InputError, ("input_precision", "8")),
    "include_tied": (quantize_model, {"model": Block(), "include_tied": 1}, TypeError, ("include_tied", "bool", "int")),
    "linear type": (Int8Linear.from_linear, {"linear": Block()}, TypeError, ("linear", "nn.Linear", "Block")),
    "linear group": (
        Int8Linear.from_linear,
        {"linear": nn.Linear(100, 4), "granularity": 32},
        InputError,
        ("granularity", "K = 100", "32"),
    ),
    "in_features": (
        Int8Linear,
        {"in_features": -1, "out_features": 4},
        InputError,
        ("in_features", "at least 0", "-1"),
    ),
    "out_features": (Int8Linear, {"in_features": 4, "out_features": 4.0}, TypeError, ("out_features", "int", "float")),
    "bias": (Int8Linear, {"in_features": 4, "out_features": 4, "bias": None}, TypeError, ("bias", "bool", "NoneType")),
    "dtype": (
        Int8Linear,
        {"in_features": 4, "out_features": 4, "dtype": "bfloat16"},
        TypeError,
        ("dtype: expected a torch.dtype", "got str 'bfloat16'; pass torch.bfloat16"),
    ),
    "device": (
        Int8Linear,
        {"in_features": 4, "out_features": 4, "device": "gpu"},
        InputError,
        ("device: expected", "'gpu'"),
    ),
    "input": (Int8Linear(64, 4), {"x": torch.zeros(2, 32)}, InputError, ("x", "K = 64", "[2, 32]")),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_is_refused(case: str) -> None:
    function, arguments, kind, words = TABLE[case]
    with pytest.raises(kind) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def test_errors_of_a_filter_and_of_groups_say_what_to_pass() -> None:
    model = nn.Sequential(nn.Linear(96, 4), nn.Linear(4, 100))
    with pytest.raises(TypeError, match=r"^filter: expected a function of \(name, module\), got one that raised: "):
        fastattn.nn.quantize_model(model, filter=lambda module: True)
    with pytest.raises(fastattn.InputError, match=r"'channel', 32, which suit K = 96, got 64 in layer '0'; .* != '0'$"):
        fastattn.nn.quantize_model(model, 64)
    with pytest.warns(UserWarning, match=r"not int8 yet, or filter\(name, module\) returned False for each"):
        fastattn.nn.quantize_model(model, filter=lambda module, name: isinstance(module, nn.Linear))


def test_a_compiled_quantisation_serves_every_k_that_its_groups_divide() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda weight: fastattn.quantize_int8(weight, 32).data, backend=keep, dynamic=True)
    for columns in (96, 128, 64, 224):
        weight = torch.randn(4, columns)
        assert torch.equal(compiled(weight), fastattn.quantize_int8(weight, 32).data)
    assert len(graphs) == 1
