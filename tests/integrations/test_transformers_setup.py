"""Tests that a model whose layers never call the attention function is refused when it is made or set to it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FalconConfig,
    LlamaConfig,
    MegatronBertConfig,
    PreTrainedModel,
)

import fastattn
import fastattn.integrations.transformers as integration
from tiny_models import VOCABULARY, make_model, output_of, tokens

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}
REFUSED = (
    r"expected one that BloomForCausalLM supports, got 'fastattn'; "
    r"its layers do not use .* attn_implementation=\"eager\""
)

MODULE = """
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

{code}
"""
OWN_MODEL = """
class OwnConfig(PreTrainedConfig):
    pass

class OwnAttention(nn.Module):
    def forward(self, query, key, value):
        return {attention}

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _supports_attention_backend = {promises}

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()
"""
SOFTMAX = "(query @ key.mT).softmax(-1) @ value"


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def bloom(implementation: str | None) -> Any:
    return AutoModelForCausalLM.from_config(BloomConfig(**BLOOM), attn_implementation=implementation)


def load_module(folder: Path, code: str) -> Any:
    """Imports ``code`` as a module with a new name, as a module's source is read only once."""
    name = f"model_of_the_user_{folder.name}"
    path = folder / f"{name}.py"
    path.write_text(MODULE.format(code=code))
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestRefused:
    def test_when_made_from_a_config(self) -> None:
        with pytest.raises(fastattn.InputError, match=REFUSED):
            bloom("fastattn")

    def test_when_loaded(self, tmp_path: Path) -> None:
        bloom("eager").save_pretrained(tmp_path)
        with pytest.raises(fastattn.InputError, match=REFUSED):
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fastattn")

    @pytest.mark.parametrize("later", ["fastattn", {"": "fastattn"}], ids=["name", "dict"])
    def test_when_set_later_and_the_model_stays_as_it_is(self, later: Any) -> None:
        model = bloom("eager")
        wanted = output_of(model, tokens())
        with pytest.raises(fastattn.InputError, match=REFUSED):
            model.set_attn_implementation(later)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(output_of(model, tokens()), wanted)

    def test_under_another_name(self) -> None:
        integration.register("ours")
        with pytest.raises(fastattn.InputError, match="got 'ours'"):
            bloom("ours")

    def test_at_the_first_forward_pass_where_the_config_was_written_to(self) -> None:
        """Such layers would take a mask that is left out for no mask at all."""
        model = bloom("eager")
        model.config._attn_implementation = "fastattn"
        with pytest.raises(fastattn.InputError, match=r"expected one that bloom supports, got 'fastattn'.*\"eager\""):
            model(**tokens())

    def test_what_to_do_where_a_model_calls_torchs_attention(self) -> None:
        config = FalconConfig(**SMALL, alibi=False)
        with pytest.raises(fastattn.InputError, match=r"FalconForCausalLM.*\"sdpa\" and .* fastattn\.patch_sdpa\(\)"):
            AutoModelForCausalLM.from_config(config, attn_implementation="fastattn")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        with fastattn.patch_sdpa(), fastattn.record() as calls:
            model(**tokens())
        assert len(calls) == 1

    def test_classes_that_inherit_from_such_a_model(self, tmp_path: Path) -> None:
        module = load_module(tmp_path, "class MyBloom(BloomForCausalLM):\n    pass")
        with pytest.raises(fastattn.InputError, match="expected one that MyBloom supports"):
            module.MyBloom._from_config(BloomConfig(**BLOOM), attn_implementation="fastattn")

    def test_a_part_of_a_larger_model_unless_it_has_an_implementation_of_its_own(self) -> None:
        def make(implementation: Any) -> Any:
            torch.manual_seed(0)
            config = EncoderDecoderConfig.from_encoder_decoder_configs(MegatronBertConfig(**SMALL), BertConfig(**SMALL))
            return EncoderDecoderModel._from_config(config, attn_implementation=implementation).eval()

        with pytest.raises(fastattn.InputError, match=r"MegatronBertModel .*\{\"\": \"fastattn\", .*: \"eager\"\}"):
            make("fastattn")
        eager = make("eager")
        wanted = output_of(eager, tokens())
        mixed = make({"": "fastattn", "encoder": "eager", "decoder": "fastattn"})
        eager.set_attn_implementation("fastattn")  # transformers skips the part, with a warning
        for model in (mixed, eager):
            assert model.encoder.config._attn_implementation == "eager"
            with fastattn.record() as calls:
                torch.testing.assert_close(output_of(model, tokens()), wanted, rtol=2e-4, atol=2e-5)
            assert len(calls) == 2  # the decoder's self-attention and cross-attention


class TestServed:
    def test_other_implementations_are_transformers_business(self) -> None:
        assert bloom(None).config._attn_implementation == "eager"
        with pytest.raises(ValueError, match="scaled_dot_product_attention yet") as error:
            bloom("sdpa")
        assert not isinstance(error.value, fastattn.InputError)
        model = bloom("eager")
        model.set_attn_implementation("sdpa")  # transformers warns
        assert model.config._attn_implementation == "eager"

    def test_registering_again_wraps_nothing_twice(self) -> None:
        before = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
        integration.register()
        integration.register("ours")
        assert before == (PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation)

    def test_a_dict_and_a_way_back(self) -> None:
        model = make_model("llama", "eager")
        for implementation, name in (({"": "fastattn"}, "fastattn"), ("sdpa", "sdpa"), ("fastattn", "fastattn")):
            model.set_attn_implementation(implementation)
            assert model.config._attn_implementation == name

    @pytest.mark.parametrize(
        ("attention", "promises", "is_served"),
        [
            ("ALL_ATTENTION_FUNCTIONS.get_interface('eager', None)(self, query, key, value)", False, True),
            ("ALL_ATTENTION_FUNCTIONS['fastattn'](self, query, key, value)", False, True),
            (SOFTMAX, True, True),
            (SOFTMAX, False, False),
        ],
        ids=["interface", "interface of before", "another part calls it", "none"],
    )
    def test_models_of_the_user(self, attention: str, promises: bool, is_served: bool, tmp_path: Path) -> None:
        code = OWN_MODEL.format(attention=attention, promises=promises)
        module = load_module(tmp_path, code)
        if is_served:
            assert module.OwnModel._from_config(module.OwnConfig(), attn_implementation="fastattn")
        else:
            with pytest.raises(fastattn.InputError, match="expected one that OwnModel supports"):
                module.OwnModel._from_config(module.OwnConfig(), attn_implementation="fastattn")

    @pytest.mark.parametrize("base", ["LlamaForCausalLM", "PreTrainedModel"])
    def test_code_of_the_user_around_a_model_that_calls_it(self, base: str, tmp_path: Path) -> None:
        code = f"class PoolingAttention(nn.Module):\n    pass\n\nclass Mine({base}):\n    config_class = LlamaConfig"
        module = load_module(tmp_path, code)
        model = module.Mine._from_config(LlamaConfig(**SMALL), attn_implementation="fastattn")
        assert model.config._attn_implementation == "fastattn"
