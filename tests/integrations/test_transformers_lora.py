"""Tests adapters of ``peft`` over the int8 layers of a model that ``Int8Config`` quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from fastattn import InputError
from fastattn.integrations.transformers import Int8Config
from fastattn.nn import Int8Linear, Int8Tensor
from int8_checkpoints import check_same, int8_names, load
from tiny_models import tokens

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The PEFT config")


def adapted(model: Any, **options: Any) -> Any:
    """Adds the same random adapters to any model; they change its results."""
    torch.manual_seed(5)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def loss_of(model: Any) -> Tensor:
    ids = tokens()["input_ids"]
    return model(input_ids=ids, labels=ids).loss


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()["input_ids"]).logits


def test_gradients_are_those_over_dequantised_weights(int8_llama: Path) -> None:
    dequantised = load(int8_llama)
    dequantised.dequantize()
    models = [adapted(load(int8_llama)), adapted(dequantised)]
    for model in models:
        loss_of(model).backward()
    gradients = [{name: p.grad for name, p in model.named_parameters() if p.requires_grad} for model in models]
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == 2 * 14
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_changes_the_adapters_alone(checkpointing: bool, int8_llama: Path) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    model = adapted(load(int8_llama), init_lora_weights=True)
    validate_quantization_for_training(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert not any(isinstance(parameter, Int8Tensor) for parameter in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    check_same(model.unload(), load(int8_llama))


def test_adapters_are_saved_and_loaded_by_themselves(int8_llama: Path, tmp_path: Path) -> None:
    model = adapted(load(int8_llama))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(int8_llama), tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))
    # transformers alone loads them too, and finds the base model by the path in their config.
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(int8_llama)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))


def test_adapters_of_transformers_itself(int8_llama: Path, tmp_path: Path) -> None:
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers takes no adapters of this peft: {error}")
    model = load(int8_llama)
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    wanted = logits_of(model)
    model.save_pretrained(tmp_path)
    again = load(int8_llama)
    again.load_adapter(str(tmp_path))
    assert torch.equal(logits_of(again), wanted)
    assert len(int8_names(again)) == 14


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_int8_is_refused_and_changes_nothing(merge: str, safe: bool, int8_llama: Path) -> None:
    model = adapted(load(int8_llama))
    before = logits_of(model)
    with pytest.raises(InputError, match=r"does not take int8 weights.* To merge adapters .* call its dequantize\(\)"):
        getattr(model, merge)(safe_merge=safe)
    assert torch.equal(logits_of(model), before)
    check_same(model.unload(), load(int8_llama))


def test_merging_after_dequantising(int8_llama: Path) -> None:
    model = adapted(load(int8_llama))
    before = logits_of(model)
    model.get_base_model().dequantize()
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora" not in name)
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)
    model.merge_adapter()
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), before, rtol=1e-4, atol=1e-4)


def test_what_prepares_a_model_for_training_on_few_bits(llama: Path) -> None:
    model = load(llama, Int8Config(), dtype=torch.bfloat16)
    model = adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
    weights = [parameter for parameter in model.parameters() if isinstance(parameter, Int8Tensor)]
    assert len(weights) == 14
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_adapters_that_compute_with_the_weight_are_refused(options: dict[str, Any], int8_llama: Path) -> None:
    with pytest.raises(InputError, match="does not take int8 weights"):
        logits_of(adapted(load(int8_llama), **options))
