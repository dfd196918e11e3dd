"""Tests ``attn_implementation="fastattn"`` on the CUDA C++ kernels: eager's results, and no detour to PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

import fastattn
import fastattn.integrations.transformers as integration
from cuda_kernels import MARKS
from kernel_device import DEVICE
from tiny_models import ENCODER_DECODERS, make_model, output_of, tokens

pytestmark = [*MARKS, pytest.mark.filterwarnings("error:fastattn runs this call in PyTorch")]

DTYPE = torch.float16


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    with fastattn.use_backend("cuda"):
        yield


def to_device(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


# These biases shift all scores of a row equally: their exact gradient is 0, so only roundings remain.
WITHOUT_GRADIENT = ("k_proj.bias", "key.bias")


def outputs_and_gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the output and every parameter's gradient, in float32."""
    output = output_of(model, inputs)
    output.float().cos().sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not name.endswith(WITHOUT_GRADIENT)
    }
    return {name: tensor.detach().float() for name, tensor in {"output": output, **gradients}.items()}


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        ("bert", "right"),
        ("modernbert", "none"),
        ("llama", "left"),
        ("gpt2", "none"),
        ("mistral", "left"),
        ("qwen2_moe", "none"),
        ("gemma2", "none"),
        ("gpt_oss", "left"),
        ("t5", "right"),
        ("bart", "right"),
    ],
)
def test_logits_and_gradients_are_eagers(family: str, padding: str) -> None:
    """The error against eager in float32 is at most twice that of eager in this dtype."""
    exact = make_model(family, "eager").to(DEVICE)
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(DTYPE).float()
    eager, ours = (make_model(family, name, DTYPE).to(DEVICE) for name in ("eager", "fastattn"))
    inputs = to_device(tokens(padding))
    wanted, usual = (outputs_and_gradients(model, inputs) for model in (exact, eager))
    with fastattn.record() as calls:
        came = outputs_and_gradients(ours, inputs)
    num_layers = 6 if family in ENCODER_DECODERS else 2
    assert [call.backend for call in calls] == ["cuda"] * (2 * num_layers)
    assert came.keys() == wanted.keys()
    for name, right in wanted.items():
        bound = 2 * (usual[name] - right).norm() + torch.finfo(DTYPE).eps * right.norm()
        assert (came[name] - right).norm() <= bound, name


def test_packed_sequences_run_in_the_kernel_for_them() -> None:
    model = make_model("mistral", "fastattn", DTYPE).to(DEVICE)
    ids = tokens()["input_ids"].to(DEVICE)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2, device=DEVICE)
    with torch.no_grad(), fastattn.record() as calls:
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in ids.split((4, 5), dim=1)], dim=1)
    assert {call.backend for call in calls} == {"cuda"}
    torch.testing.assert_close(packed, alone, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_step_over_a_static_cache_reads_what_is_there(padding: str) -> None:
    """The rest of the cache is NaN, which the decoding kernel does not read. With padding, another kernel runs."""
    model = make_model("gemma2", "fastattn", DTYPE).to(DEVICE)
    inputs = to_device(tokens(padding))
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits[:, -1]
        cache = StaticCache(model.config, max_cache_len=16)
        model(ids[:, :8], attention_mask=None if mask is None else mask[:, :8], past_key_values=cache)
        for layer in cache.layers:
            if not layer.is_sliding:
                layer.keys[:, :, 8:], layer.values[:, :, 8:] = torch.nan, torch.nan
        with fastattn.record() as calls:
            came = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits[:, 0]
    assert {call.backend for call in calls} == {"cuda"}
    assert ("decode" in {call.op for call in calls}) is (padding == "none")
    torch.testing.assert_close(came, wanted, rtol=2e-2, atol=2e-2)


def test_generate_gives_eagers_tokens() -> None:
    inputs = to_device(tokens("left", length=6))
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    wanted, came = (
        make_model("gpt_oss", name, DTYPE).to(DEVICE).generate(**inputs, **options) for name in ("eager", "fastattn")
    )
    assert torch.equal(came, wanted)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_an_8_bit_cache_is_read_by_the_decoding_kernel(padding: str, dtype: str) -> None:
    """After the prompt every layer decodes, with padding or without. The reference is PyTorch with the same cache."""
    inputs = to_device(tokens(padding, length=6))
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    results = []
    for backend in ("torch", "cuda"):
        model = make_model("gemma2", "fastattn", DTYPE, head_dim=16).to(DEVICE)
        cache = integration.Cache(model.config, batch_size=2, max_length=12, dtype=dtype)
        with fastattn.use_backend(backend), fastattn.record() as calls:
            results.append(model.generate(**inputs, past_key_values=cache, **options))
    assert torch.equal(*results)
    assert [(call.op, call.backend) for call in calls] == [("attention", "cuda")] * 2 + [("decode", "cuda")] * 4


@pytest.mark.parametrize(("input_precision", "width"), [("16bit", 37), ("int8", 48)])
def test_int8_layers_come_as_int8_and_run_in_the_kernel(input_precision: str, width: int, tmp_path: Path) -> None:
    """The results are those of the same model on the PyTorch path, even if rows are no multiple of a vector."""
    make_model("llama", "eager", DTYPE, intermediate_size=width).save_pretrained(tmp_path)
    config = integration.Int8Config(input_precision=input_precision)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, attn_implementation="eager")
    ids = tokens()["input_ids"]
    with torch.no_grad():
        with fastattn.use_backend("torch"):
            wanted = model(ids).logits
        model.to(DEVICE)
        with fastattn.record() as calls:
            came = model(ids.to(DEVICE)).logits
    assert [(call.op, call.backend) for call in calls] == [("int8_matmul", "cuda")] * 14
    torch.testing.assert_close(came.cpu(), wanted, rtol=2e-2, atol=5e-2)


def test_adapters_over_int8_layers_get_the_gradients_of_dequantised_ones(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)  # seeds the adapters, which are so large that float16 may round gradients by 2 %
    make_model("llama", "eager", DTYPE).save_pretrained(tmp_path)
    config = integration.Int8Config()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, attn_implementation="eager")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).to(DEVICE)
    ids = tokens()["input_ids"].to(DEVICE)

    def gradients() -> Tensor:
        adapted(input_ids=ids, labels=ids).loss.backward()
        found = [p.grad.float().flatten() for p in adapted.parameters() if p.grad is not None]
        adapted.zero_grad()
        return torch.cat(found)

    with fastattn.record() as calls:
        over_int8 = gradients()
    assert {call.backend for call in calls} == {"cuda"}
    assert {call.op for call in calls} >= {"int8_matmul"}
    adapted.get_base_model().dequantize()
    over_floats = gradients()
    assert (over_int8 - over_floats).norm() <= 2e-2 * over_floats.norm()
