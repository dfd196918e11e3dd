"""Tests ``Int8Config``: how ``from_pretrained`` quantises a checkpoint, and what ``save_pretrained`` writes."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import fastattn.nn
from fastattn import InputError
from fastattn.integrations.transformers import Int8Config
from fastattn.nn import Int8Tensor
from int8_checkpoints import check_same, int8_names, load
from tiny_models import FAMILIES, make_model, output_of, tokens

UP = "model.layers.0.mlp.up_proj"
HEADED = ("llama", "mistral", "qwen2_moe", "gpt_oss")  # whose heads are not tied
MIXTURES = ("qwen2_moe", "gpt_oss")


class TestLoadingAndSaving:
    @pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt2"}))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_bits_are_those_of_quantize_model_and_stay_the_same(
        self, family: str, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        model = make_model(family, "eager", dtype)
        model.save_pretrained(tmp_path / "float")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            ours = load(tmp_path / "float", Int8Config(), family)
        assert sum("Int8Config" in str(warning.message) for warning in given) == (family in MIXTURES)
        stays = ours.hf_quantizer.stays
        by_hand = load(tmp_path / "float", None, family)
        fastattn.nn.quantize_model(by_hand, filter=lambda name, _: name not in stays)
        check_same(ours, by_hand)
        assert len(int8_names(ours)) >= 8
        assert all(parameter.device.type == "cpu" for parameter in ours.parameters())

        ours.save_pretrained(tmp_path / "int8")
        again = load(tmp_path / "int8", None, family)
        check_same(ours, again)
        for target, source in model.all_tied_weights_keys.items():
            assert again.get_parameter(target) is again.get_parameter(source)
        again.save_pretrained(tmp_path / "again")
        check_same(ours, load(tmp_path / "again", None, family))
        inputs = tokens()
        assert torch.equal(output_of(ours, inputs), output_of(again, inputs))

    @pytest.mark.filterwarnings("ignore:Int8Config")
    @pytest.mark.parametrize("family", [*HEADED, "gemma2", "t5", "bart"])
    def test_the_head_stays(self, family: str, tmp_path: Path) -> None:
        make_model(family, "eager").save_pretrained(tmp_path)
        model = load(tmp_path, Int8Config(), family)
        assert type(model.lm_head) is nn.Linear
        reason = model.hf_quantizer.stays["lm_head"]
        assert ("output embedding" if family in HEADED else "its weight is also ") in reason

    def test_a_head_that_is_named_becomes_int8(self, llama: Path, tmp_path: Path) -> None:
        model = load(llama, Int8Config(modules_to_convert=["lm_head"]))
        assert "lm_head" in int8_names(model)
        model.save_pretrained(tmp_path)
        check_same(model, load(tmp_path))

    def test_int8_is_less_memory_and_a_smaller_file(self, llama: Path, int8_llama: Path) -> None:
        model, int8 = load(llama), load(int8_llama)
        assert int8.get_memory_footprint() < 0.5 * model.get_memory_footprint()
        sizes = [(path / "model.safetensors").stat().st_size for path in (llama, int8_llama)]
        assert sizes[1] < 0.55 * sizes[0]

    def test_config_json_says_it(self, int8_llama: Path) -> None:
        kept = json.loads((int8_llama / "config.json").read_text())["quantization_config"]
        assert kept == {
            "quant_method": "fastattn_int8",
            "granularity": "channel",
            "input_precision": "16bit",
            "modules_to_not_convert": None,
            "modules_to_convert": None,
        }

    @pytest.mark.parametrize("granularity", ["tensor", "channel", 32])
    def test_options_come_back(self, granularity: str | int, tmp_path: Path) -> None:
        make_model("llama", "eager", intermediate_size=64).save_pretrained(tmp_path / "float")
        config = Int8Config(granularity, "int8", modules_to_not_convert=["layers.0.mlp", "model.layers.1.*.k_proj"])
        model = load(tmp_path / "float", config)
        model.save_pretrained(tmp_path / "int8")
        again = load(tmp_path / "int8")
        check_same(model, again)
        expected = {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
        expected |= {f"model.layers.1.self_attn.{name}_proj" for name in "qvo"}
        expected |= {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
        assert int8_names(again) == expected
        layer = again.model.layers[1].mlp.up_proj
        assert (layer.granularity, layer.input_precision) == (granularity, "int8")

    def test_shards(self, llama: Path, int8_llama: Path, tmp_path: Path) -> None:
        load(llama).save_pretrained(tmp_path / "float", max_shard_size="8KB")
        assert len(list((tmp_path / "float").glob("*.safetensors"))) > 3
        model = load(tmp_path / "float", Int8Config())
        check_same(model, load(int8_llama))
        model.save_pretrained(tmp_path / "int8", max_shard_size="4KB")
        assert len(list((tmp_path / "int8").glob("*.safetensors"))) > 3
        check_same(model, load(tmp_path / "int8"))

    def test_rows_that_are_no_multiple_of_16(self, tmp_path: Path) -> None:
        """Kernels need padding after such rows, which files do not contain."""
        make_model("llama", "eager", intermediate_size=37).save_pretrained(tmp_path / "float")
        model = load(tmp_path / "float", Int8Config())
        model.save_pretrained(tmp_path / "int8")
        again = load(tmp_path / "int8")
        check_same(model, again)
        for layer in (model.model.layers[0].mlp.down_proj, again.model.layers[0].mlp.down_proj):
            assert layer.int8_weight.data.stride() == (48, 1)

    @pytest.mark.parametrize("named", [[], ["gate_proj"], ["up_proj"]], ids=str)
    def test_one_weight_of_the_file_for_two_layers(self, named: list[str], tmp_path: Path) -> None:
        config = transformers.Dinov2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, use_swiglu_ffn=True
        )
        transformers.Dinov2Model(config).save_pretrained(tmp_path / "float")
        names = load_file(tmp_path / "float" / "model.safetensors").keys()
        assert "encoder.layer.0.mlp.weights_in.weight" in names
        read = transformers.Dinov2Model.from_pretrained
        model = read(tmp_path / "float", quantization_config=Int8Config(modules_to_not_convert=named))
        by_hand = read(tmp_path / "float")
        fastattn.nn.quantize_model(by_hand, filter=lambda name, _: name not in model.hf_quantizer.stays)
        check_same(model, by_hand)
        model.save_pretrained(tmp_path / "int8")
        again = read(tmp_path / "int8")
        check_same(model, again)
        again.dequantize()
        again.save_pretrained(tmp_path / "back")
        assert load_file(tmp_path / "back" / "model.safetensors").keys() == names
        check_same(again, read(tmp_path / "back"))

    def test_a_base_model_and_heads_read_each_others_checkpoints(self, llama: Path, tmp_path: Path) -> None:
        load(llama, Int8Config(modules_to_not_convert=["model.layers.0.mlp"])).save_pretrained(tmp_path / "lm")
        base = transformers.LlamaModel.from_pretrained(tmp_path / "lm")
        assert len(int8_names(base)) == 11
        base.save_pretrained(tmp_path / "base")
        classes = transformers.LlamaForSequenceClassification
        for path in ("lm", "base"):
            classifier = classes.from_pretrained(tmp_path / path, num_labels=3)
            assert type(classifier.score) is nn.Linear
            assert classifier.score.weight.requires_grad
            assert len(int8_names(classifier)) == 11
        classifier.save_pretrained(tmp_path / "classifier")
        check_same(classifier, classes.from_pretrained(tmp_path / "classifier"))

    def test_layers_that_another_classs_checkpoint_lacks_stay_floating(self, tmp_path: Path) -> None:
        _, config_class, options = FAMILIES["bert"]
        config = getattr(transformers, config_class)(**options)
        transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "float")  # without a pooler
        read = transformers.BertModel.from_pretrained
        models = [read(tmp_path / "float", quantization_config=Int8Config())]
        transformers.BertForMaskedLM.from_pretrained(
            tmp_path / "float", quantization_config=Int8Config()
        ).save_pretrained(tmp_path / "int8")
        models.append(read(tmp_path / "int8"))
        for number, model in enumerate(models):
            assert type(model.pooler.dense) is nn.Linear
            assert model.pooler.dense.weight.std() > 0
            assert "new" in model.hf_quantizer.stays["pooler.dense"]
            model.save_pretrained(tmp_path / f"{number}")
            check_same(model, read(tmp_path / f"{number}"))

    def test_a_state_dict_in_place_of_a_file(self, llama: Path) -> None:
        floating = load(llama)
        model = transformers.LlamaForCausalLM.from_pretrained(
            None, config=floating.config, state_dict=floating.state_dict(), quantization_config=Int8Config()
        )
        check_same(model, load(llama, Int8Config()))

    def test_dtype_is_what_layers_stand_for(self, llama: Path, int8_llama: Path) -> None:
        for model in (load(llama, Int8Config(), dtype=torch.float16), load(int8_llama, dtype="float16")):
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
            assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float32
            assert model(tokens()["input_ids"]).logits.dtype == torch.float16

    def test_with_checks_on(self, llama: Path, int8_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTATTN_CHECK", "1")
        check_same(load(llama, Int8Config()), load(int8_llama))

    def test_generation_and_copies(self, int8_llama: Path) -> None:
        model = load(int8_llama)
        ids = tokens()["input_ids"]
        texts = [each.generate(ids, max_new_tokens=3, do_sample=False) for each in (model, copy.deepcopy(model))]
        assert texts[0].shape == (2, 12)
        assert texts[0].equal(texts[1])
        with pytest.raises(InputError, match="raw memory"):  # outside of loading
            model.model.layers[0].mlp.up_proj.weight.data_ptr()

    def test_compiled(self, int8_llama: Path) -> None:
        model = load(int8_llama)
        assert model.hf_quantizer.is_compileable
        ids = tokens()["input_ids"]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(ids).logits, model(ids).logits)


class TestDevices:
    @pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
    def test_device_map(self, device_map: Any, llama: Path, int8_llama: Path, tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        model = load(llama, Int8Config(), device_map=device_map)
        check_same(model, load(int8_llama, device_map=device_map))
        model.save_pretrained(tmp_path)
        check_same(model, load(tmp_path))

    def test_meta(self, llama: Path, int8_llama: Path) -> None:
        pytest.importorskip("accelerate")
        for model in (load(llama, Int8Config(), device_map="meta"), load(int8_llama, device_map="meta")):
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
            assert isinstance(model.model.layers[0].mlp.up_proj.weight, Int8Tensor)

    def test_layers_spread_over_devices(self, llama: Path, int8_llama: Path) -> None:
        """accelerate's hooks run as for several GPUs; here both devices are the CPU."""
        pytest.importorskip("accelerate")
        devices = {"model": torch.device("cpu"), "lm_head": torch.device("cpu", 0)}
        ids = tokens()["input_ids"]
        wanted = load(int8_llama)(ids).logits
        for model in (load(llama, Int8Config(), device_map=devices), load(int8_llama, device_map=devices)):
            assert hasattr(model.model.layers[0].mlp.up_proj, "_hf_hook")
            assert torch.equal(model(ids).logits, wanted)
            model.dequantize()
            assert hasattr(model.model.layers[0].mlp.up_proj, "_hf_hook")
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        "device_map",
        [{"model": "cpu", "lm_head": "disk"}, {"": "disk"}, {"model": 0, "lm_head": "cpu"}],
        ids=str,
    )
    def test_offloading_is_refused(self, device_map: Any, llama: Path, int8_llama: Path) -> None:
        pytest.importorskip("accelerate")
        for path, config in ((llama, Int8Config()), (int8_llama, None)):
            with pytest.raises(InputError, match="device_map: expected all layers on GPUs, or all on the CPU"):
                load(path, config, device_map=device_map)

    def test_bytes_that_a_layer_takes(self, llama: Path) -> None:
        quantizer = load(llama, Int8Config(granularity="tensor")).hf_quantizer
        model = load(llama, Int8Config())
        size = quantizer.param_element_size(model, f"{UP}.weight", torch.empty(48, 32, dtype=torch.bfloat16))
        assert size == 1 + 4 * 48 / (48 * 32)
        assert quantizer.param_element_size(model, "lm_head.weight", model.lm_head.weight) == 4


class TestDequantize:
    def test_gives_the_floating_model(self, int8_llama: Path, tmp_path: Path) -> None:
        model = load(int8_llama)
        ids = tokens()["input_ids"]
        wanted = model(ids).logits
        weight = model.model.layers[0].mlp.up_proj.int8_weight.dequantize()
        model.dequantize()
        assert not int8_names(model)
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, weight)
        assert all(parameter.requires_grad for parameter in model.parameters())
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        check_same(model, load(tmp_path))

    def test_after_saving_and_in_another_dtype(self, int8_llama: Path, tmp_path: Path) -> None:
        model = load(int8_llama)
        model.save_pretrained(tmp_path)  # replaces the config's dtype by its name
        model.dequantize()
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
        model = load(int8_llama)
        model.dequantize(dtype=torch.float16)
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float16
