"""Tests what ``Int8Config`` refuses: options, models, devices, and checkpoints that are not what they claim to be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from fastattn import InputError
from fastattn.integrations import transformers as integration
from fastattn.integrations.transformers import Int8Config
from int8_checkpoints import check_same, dropped, edited, int8_names, load, replaced
from tiny_models import make_model

UP = "model.layers.0.mlp.up_proj"


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"granularity": 48}, "granularity: expected one of"),
            ({"granularity": "row"}, "granularity: expected one of"),
            ({"input_precision": "fp8"}, "input_precision: expected one of '16bit', 'int8'"),
            ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list of names"),
            ({"modules_to_convert": [1]}, "modules_to_convert: expected a list of names"),
            ({"modules_to_convert": 5}, "modules_to_convert: expected a list of names"),
            ({"bits": 4}, "has no option 'bits'"),
            ({"quant_method": "eetq"}, "quant_method: expected 'fastattn_int8', got 'eetq'"),
        ],
        ids=str,
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises((InputError, TypeError), match=message):
            Int8Config(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"granularity": 32}, r"suit K = 48, got 32 in layer 'model.layers.0.mlp.down_proj'; .* modules_to_not"),
            ({"modules_to_not_convert": ["lm_heads", "mlp"]}, r"got \['lm_heads'\]; did you mean 'lm_head'\?"),
            ({"modules_to_not_convert": ["layers.7"]}, r"of LlamaForCausalLM, got \['layers.7'\]"),
            ({"modules_to_not_convert": ["up"]}, r"of LlamaForCausalLM, got \['up'\]"),
            ({"modules_to_convert": ["head"]}, r"modules_to_convert: expected names of modules of LlamaForCausalLM"),
            ({"modules_to_convert": ["embed_tokens"]}, "expected names of linear layers, got 'embed_tokens'"),
            ({"modules_to_not_convert": ["model"]}, "of which nothing would be"),
        ],
        ids=str,
    )
    def test_options_that_do_not_suit_the_model(self, options: dict[str, Any], message: str, llama: Path) -> None:
        with pytest.raises(InputError, match=message):
            load(llama, Int8Config(**options))

    def test_a_tied_head(self, tmp_path: Path) -> None:
        make_model("gemma2", "eager").save_pretrained(tmp_path)
        with pytest.raises(InputError, match=r"'lm_head' cannot be int8: its weight is also model.embed_tokens.weight"):
            load(tmp_path, Int8Config(modules_to_convert=["lm_head"]), "gemma2")

    def test_a_model_of_conv1d(self, tmp_path: Path) -> None:
        make_model("gpt2", "eager").save_pretrained(tmp_path)
        with pytest.raises(InputError, match=r"got GPT2LMHeadModel.*8 modules stay, transformer.h.0.*is a Conv1D"):
            load(tmp_path, Int8Config(), "gpt2")

    def test_experts_stay_and_a_warning_says_so(self, tmp_path: Path) -> None:
        make_model("qwen2_moe", "eager").save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="2 modules stay, model.layers.0.mlp.experts .*3-D") as given:
            model = load(tmp_path, Int8Config(), "qwen2_moe")
        assert given[0].filename == load.__code__.co_filename  # the warning points to the caller of from_pretrained
        assert model.model.layers[0].mlp.experts.down_proj.is_floating_point()
        experts = "'model.layers.0.mlp.experts' cannot be int8: it is a Qwen2MoeExperts"
        with pytest.raises(InputError, match=re.escape(experts)):
            load(tmp_path, Int8Config(modules_to_convert=["experts"]), "qwen2_moe")

    def test_a_dtype(self, llama: Path) -> None:
        with pytest.raises(InputError, match=r"dtype: expected one of .* got torch.float8_e4m3fn"):
            load(llama, Int8Config(), dtype=torch.float8_e4m3fn)

    @pytest.mark.filterwarnings("ignore:Passing `tp_plan` directly")
    def test_plans_of_transformers_own_are_refused(self, llama: Path) -> None:
        with pytest.raises(InputError, match="tp_plan"):
            load(llama, Int8Config(), tp_plan="auto")

    def test_training_all_of_it(self, int8_llama: Path) -> None:
        from transformers.trainer_utils import validate_quantization_for_training

        with pytest.raises(ValueError, match="adapters"):
            validate_quantization_for_training(load(int8_llama))


class TestCheckpointsThatAreNotOurs:
    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (dropped(f"{UP}.weight_scale"), f"{UP}.weight: expected int8 .1, 48, 32. and its weight_scale"),
            (dropped(f"{UP}.weight"), f"{UP}.weight: expected int8"),
            (dropped(f"{UP}.weight", f"{UP}.weight_scale"), f"got none for {UP}"),
            (replaced(f"{UP}.weight", lambda weight: weight[:, :-1]), f"{UP}.weight: expected int8"),
            (replaced(f"{UP}.weight", lambda weight: weight[0]), f"{UP}.weight: expected int8"),
            (replaced(f"{UP}.weight", Tensor.float), f"{UP}.weight: expected int8"),
            (replaced(f"{UP}.weight_scale", lambda scale: scale[:-1]), r"= \[48, 1\], got \[47, 1\]"),
            (replaced(f"{UP}.weight_scale", Tensor.half), "scale: expected torch.float32, got torch.float16"),
            (replaced("lm_head.weight", Tensor.char), "lm_head.weight: expected a floating weight"),
            (lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(61, 1)}), "lm_head.weight: expected a"),
        ],
        ids=[
            "no scales",
            "scales alone",
            "neither",
            "another shape",
            "a matrix",
            "floating",
            "fewer scales",
            "narrow scales",
            "int8 where floats belong",
            "scales where none belong",
        ],
    )
    def test_broken_int8(self, edit: Any, message: str, int8_llama: Path, tmp_path: Path) -> None:
        path = edited(int8_llama, tmp_path / "edited", edit)
        for options in ({}, {"ignore_mismatched_sizes": True}):
            with pytest.raises(InputError, match=message):
                load(path, **options)

    def test_all_problems_are_listed(self, int8_llama: Path, tmp_path: Path) -> None:
        down = UP.replace("up", "down")
        path = edited(int8_llama, tmp_path / "edited", dropped(f"{UP}.weight_scale", f"{down}.weight_scale"))
        with pytest.raises(InputError, match=rf"(?s){down}.*\n  {UP}"):
            load(path)

    def test_quantised_by_others_without_saying_so(self, llama: Path, int8_llama: Path, tmp_path: Path) -> None:
        path = edited(llama, tmp_path / "edited", replaced(f"{UP}.weight", lambda weight: weight.to(torch.int8)))
        with pytest.raises(InputError, match=f"expected floating weights to quantise, got {UP}.weight in I8"):
            load(path, Int8Config())

        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
        with pytest.raises(InputError, match=f"expected floating weights to quantise, got {UP}.weight in torch.int8"):
            load(path, Int8Config())

        stripped = edited(int8_llama, tmp_path / "stripped", lambda tensors: None)
        config = json.loads((stripped / "config.json").read_text())
        del config["quantization_config"]
        (stripped / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="in I8: it is quantised already"):
            load(stripped, Int8Config())
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers refuses the shapes
            load(stripped)

    def test_another_config(self, llama: Path, int8_llama: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="Int8Config but you are passing a EetqConfig"):
            load(int8_llama, transformers.EetqConfig())
        with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
            check_same(load(int8_llama, Int8Config(granularity="tensor")), load(int8_llama))

        later = edited(int8_llama, tmp_path / "later", lambda tensors: None)
        config = json.loads((later / "config.json").read_text())
        config["quantization_config"]["bits"] = 4
        (later / "config.json").write_text(json.dumps(config))
        with pytest.raises(TypeError, match=r"no option 'bits'; .* a later fastattn may have more"):
            load(later)

    def test_floating_weights_of_another_shape(self, llama: Path, tmp_path: Path) -> None:
        """transformers refuses such weights, or draws new ones if told to."""
        path = edited(llama, tmp_path / "edited", replaced(f"{UP}.weight", lambda weight: weight[:-1]))
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            load(path, Int8Config())
        model = load(path, Int8Config(), ignore_mismatched_sizes=True)
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        assert len(int8_names(model)) == 13

    def test_a_checkpoint_of_something_else(self, llama: Path, tmp_path: Path) -> None:
        def drop_layers(tensors: dict[str, Tensor]) -> None:
            dropped(*(name for name in tensors if "layers" in name))(tensors)

        path = edited(llama, tmp_path / "edited", drop_layers)
        with pytest.raises(InputError, match="expected the weights of LlamaForCausalLM's linear layers, got none for"):
            load(path, Int8Config())


class TestRegistration:
    def test_again_is_fine(self, int8_llama: Path) -> None:
        integration.register()
        integration.register()
        assert int8_names(load(int8_llama))

    def test_a_name_that_others_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "fastattn_int8", transformers.quantizers.HfQuantizer)
        with pytest.raises(InputError, match="expected a free name"):
            integration.register()
        assert AUTO_QUANTIZER_MAPPING["fastattn_int8"] is transformers.quantizers.HfQuantizer
