"""Tests ``attn_implementation="fastattn"`` on the PyTorch path: results equal the models' eager code, without masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import fastattn
import fastattn.integrations.transformers as integration
from fastattn.integrations.transformers import attention as attention_module
from tiny_models import DECODERS, ENCODER_DECODERS, FAMILIES, make_model, output_of, tokens

EXACT = {"rtol": 2e-4, "atol": 2e-5}

# Families that need whole masks: with a window that layers do not pass on, a bias that has every position anyway, or
# layers that add masks to scores themselves.
NEEDS_WHOLE_MASKS = ("qwen2_moe", "t5", "pegasus_x", "bigbird_pegasus")
NUM_CALLS = dict.fromkeys(ENCODER_DECODERS, 6) | {"pegasus_x": 4, "bigbird_pegasus": 4}


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture
def biases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Yields a list of all masks and biases that reach ``fastattn.attention`` with more than one query."""
    seen = []

    def spy(query: Tensor, *arguments: Any, bias: Tensor | None, **options: Any) -> Any:
        if bias is not None and query.shape[2] > 1:
            seen.append(bias)
        return fastattn.attention(query, *arguments, bias=bias, **options)

    monkeypatch.setattr(attention_module, "attention", spy)
    yield seen


def both(family: str, **changes: Any) -> tuple[Any, Any]:
    return make_model(family, "eager", **changes), make_model(family, "fastattn", **changes)


def check_gradients(eager: Any, ours: Any, outputs: list[Tensor]) -> None:
    for output in outputs:
        output.cos().sum().backward()
    for wanted, came in zip(eager.parameters(), ours.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(came.grad, wanted.grad, rtol=2e-3, atol=2e-3)


class TestForwardAndBackward:
    @pytest.mark.parametrize("padding", ["none", "left", "right"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_every_family_are_eagers(self, family: str, padding: str, biases: list[Tensor]) -> None:
        eager, ours = both(family)
        inputs = tokens(padding)
        with fastattn.record() as calls:
            outputs = [output_of(model, inputs) for model in (eager, ours)]
        torch.testing.assert_close(outputs[1], outputs[0], **EXACT)
        assert len(calls) == NUM_CALLS.get(family, 2)
        for output in outputs:
            output.cos().sum().backward()
        for (name, wanted), came in zip(eager.named_parameters(), ours.parameters(), strict=True):
            if wanted.grad is None:
                assert came.grad is None, name
            else:
                error = (came.grad - wanted.grad).abs().max() / wanted.grad.abs().max().clamp(min=0.1)
                assert error < 1e-3, name
        if family not in NEEDS_WHOLE_MASKS:
            assert all(bias.shape[1:3] == (1, 1) for bias in biases)
            assert (padding == "none") <= (not biases)

    def test_a_position_bias_is_not_repeated_for_each_sequence(self, biases: list[Tensor]) -> None:
        output_of(make_model("t5", "fastattn"), tokens())
        assert biases and all(bias.shape[0] == 1 for bias in biases)

    def test_grouped_keys_and_values_keep_their_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heads = []

        def spy(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
            heads.append((query.shape[1], key.shape[1]))
            return fastattn.attention(query, key, *rest, **options)

        monkeypatch.setattr(attention_module, "attention", spy)
        output_of(make_model("llama", "fastattn"), tokens("left"))
        assert heads == [(4, 2)] * 2

    def test_dropout_comes_from_torchs_generator(self) -> None:
        model = make_model("llama", "fastattn", attention_dropout=0.4).train()
        outputs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outputs.append(output_of(model, tokens()))
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.allclose(outputs[0], outputs[2])
        torch.testing.assert_close(output_of(model.eval(), tokens()), output_of(make_model("llama", "eager"), tokens()))

    @pytest.mark.parametrize("padding", ["none", "left"])
    def test_masks_say_what_is_causal_whatever_the_layers_say(self, padding: str) -> None:
        model = make_model("mistral", "fastattn")
        wanted = output_of(model, tokens(padding))
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        assert torch.equal(output_of(model, tokens(padding)), wanted)

    def test_a_decoder_that_is_told_to_look_both_ways(self) -> None:
        for padding in ("none", "right"):
            # transformers' own layers rely on the mask there: they are right for a padded batch
            eager, ours = both("llama", is_causal=False)
            torch.testing.assert_close(output_of(ours, tokens(padding)), output_of(eager, tokens(padding)), **EXACT)

    def test_an_implementation_can_be_set_later_and_saved_models_load_with_it(self, tmp_path: Any) -> None:
        model = make_model("llama", "eager")
        wanted = output_of(model, tokens())
        model.save_pretrained(tmp_path)
        model.set_attn_implementation("fastattn")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fastattn")
        for changed in (model, loaded):
            with fastattn.record() as calls:
                torch.testing.assert_close(output_of(changed, tokens()), wanted, **EXACT)
            assert len(calls) == 2


class TestMasksOfTheUser:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "additive"])
    @pytest.mark.parametrize("rows", [1, 9], ids=["a row", "whole"])
    @pytest.mark.parametrize("family", ["bert", "llama", "gemma2", "t5"])
    def test_say_all_there_is_to_say(self, family: str, rows: int, dtype: torch.dtype) -> None:
        eager, ours = both(family)
        visible = torch.rand(2, 1, rows, 9, generator=torch.Generator().manual_seed(1)) < 0.6
        visible[..., 0] = True
        additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        ids = tokens()["input_ids"]
        changes = {"decoder_input_ids": ids} if family == "t5" else {}
        outputs = [
            model(input_ids=ids, attention_mask=mask, **changes)[0]
            for model, mask in ((eager, additive), (ours, visible if dtype == torch.bool else additive))
        ]
        torch.testing.assert_close(outputs[1], outputs[0], **EXACT)

    def test_of_another_dtype_are_refused(self) -> None:
        mask = torch.ones(2, 1, 9, 9, dtype=torch.int64)
        with pytest.raises(fastattn.InputError, match=r"attention_mask: expected a bool or floating mask.*int64"):
            make_model("llama", "fastattn")(**tokens(), attention_mask=mask)

    def test_with_too_few_columns_are_refused_by_name(self) -> None:
        query = torch.randn(2, 4, 9, 8)
        for name in ("attention_mask", "position_bias"):
            masks = {"attention_mask": None, name: torch.zeros(2, 1, 9, 8)}
            with pytest.raises(
                fastattn.InputError, match=rf"^{name}: expected .* = \[2, 4, 9, 9\], got \[2, 1, 9, 8\]"
            ):
                attention_module.attend(torch.nn.Module(), query, query, query, **masks)


class TestRangesOfKeys:
    """Llama 4 attends in chunks in every other layer."""

    @pytest.fixture(autouse=True)
    def chunked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {**FAMILIES["llama"][2], "head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 48}
        options |= {"num_local_experts": 2, "interleave_moe_layer_step": 4, "no_rope_layers": [1, 0]}
        monkeypatch.setitem(FAMILIES, "llama4", ("Llama4ForCausalLM", "Llama4TextConfig", options))

    @pytest.mark.parametrize("padding", ["none", "left", "right"])
    def test_chunks_form_no_mask(self, padding: str, biases: list[Tensor]) -> None:
        eager, ours = both("llama4")
        outputs = [output_of(model, tokens(padding)) for model in (eager, ours)]
        torch.testing.assert_close(outputs[1], outputs[0], **EXACT)
        assert all(bias.shape[1:3] == (1, 1) for bias in biases)
        check_gradients(eager, ours, outputs)

    def test_generation(self) -> None:
        options = {"max_new_tokens": 6, "do_sample": False}
        wanted, came = (model.generate(**tokens("left"), **options) for model in both("llama4"))
        assert torch.equal(came, wanted)


class TestPackedSequences:
    LENGTHS = ((4, 2, 3), (1, 8))

    def position_ids(self) -> Tensor:
        return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.LENGTHS])

    @pytest.mark.parametrize("family", DECODERS)
    def test_restarting_positions_separate_them(self, family: str, biases: list[Tensor]) -> None:
        eager, ours = both(family)
        inputs = {**tokens(), "position_ids": self.position_ids(), "use_cache": False}
        outputs = [model(**inputs).logits for model in (eager, ours)]
        torch.testing.assert_close(outputs[1], outputs[0], **EXACT)
        assert not biases or family in NEEDS_WHOLE_MASKS
        check_gradients(eager, ours, outputs)

    @pytest.mark.parametrize("longest", [4, None, torch.tensor(4)], ids=["int", "none", "tensor"])
    @pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
    def test_offsets_separate_them(self, family: str, longest: Any) -> None:
        """GPT-OSS needs offsets: its masks ignore positions that restart."""
        eager, ours = both(family)
        inputs = {"input_ids": tokens()["input_ids"][:1], "position_ids": self.position_ids()[:1], "use_cache": False}
        offsets = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
        with fastattn.record() as calls:
            lengths = {"max_length_q": longest, "max_length_k": longest}
            packed = ours(**inputs, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, **lengths).logits
        assert len(calls) == 2
        alone = [eager(sequence, use_cache=False).logits for sequence in inputs["input_ids"].split((4, 2, 3), dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), **EXACT)

    def test_with_a_position_bias_are_refused(self) -> None:
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        query = torch.randn(1, 4, 9, 8)
        with pytest.raises(fastattn.InputError, match="position_bias: expected None for packed sequences"):
            attention_module.attend(
                *(torch.nn.Module(), query, query, query, None),
                position_bias=torch.zeros(1, 4, 9, 9),
                cu_seq_lens_q=offsets,
                cu_seq_lens_k=offsets,
            )


class TestCaches:
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("padding", ["none", "left"])
    @pytest.mark.parametrize("family", DECODERS + ENCODER_DECODERS)
    def test_generate_gives_eagers_tokens(self, family: str, padding: str, cache: str, biases: list[Tensor]) -> None:
        options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        eager, ours = both(family)
        wanted = eager.generate(**tokens(padding), **options)
        with fastattn.record() as calls:
            came = ours.generate(**tokens(padding), **options)
        assert torch.equal(came, wanted)
        assert len(calls) >= 7 * 2
        if family not in NEEDS_WHOLE_MASKS:
            assert all(bias.shape[1:3] == (1, 1) for bias in biases)

    def test_beams(self) -> None:
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
        wanted, came = (model.generate(**tokens("left"), **options) for model in both("mistral"))
        assert torch.equal(came, wanted)

    @pytest.mark.parametrize("padding", ["none", "left"])
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
    def test_prompts_in_chunks(self, family: str, cache: str, padding: str) -> None:
        """Several queries at a time follow a cache that is not empty. Gradients are on, as some users leave them."""
        eager, ours = both(family)
        inputs = tokens(padding, length=12)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = eager(inputs["input_ids"], attention_mask=mask, position_ids=positions).logits
        filled = DynamicCache(config=ours.config) if cache == "dynamic" else StaticCache(ours.config, max_cache_len=16)
        parts = []
        for begin, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
            part = ours(
                inputs["input_ids"][:, begin:end],
                attention_mask=mask[:, :end] if padding == "left" else None,
                position_ids=positions[:, begin:end],
                past_key_values=filled,
            )
            parts.append(part.logits)
        is_token = mask.bool()
        torch.testing.assert_close(torch.cat(parts, 1)[is_token], wanted[is_token], **EXACT)


@pytest.mark.slow
class TestCompiled:
    @pytest.mark.parametrize("padding", ["none", "left"])
    def test_a_graph_without_breaks(self, padding: str) -> None:
        eager, ours = both("mistral")
        inputs = {**tokens(padding), "use_cache": False}
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            wanted, came = (model(**inputs).logits for model in (eager, compiled))
        is_token = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        torch.testing.assert_close(came[is_token], wanted[is_token], **EXACT)

    def test_a_step_over_a_static_cache(self) -> None:
        eager, ours = both("llama")
        ids = tokens()["input_ids"]
        step = torch.compile(ours, fullgraph=True, backend="eager")
        with torch.no_grad():
            cache = StaticCache(ours.config, max_cache_len=16)
            ours(ids[:, :7], past_key_values=cache)
            came = [step(ids[:, i : i + 1], past_key_values=cache).logits for i in (7, 8)]
            wanted = eager(ids).logits[:, 7:]
        torch.testing.assert_close(torch.cat(came, 1), wanted, **EXACT)


class TestRefusals:
    def test_attention_weights(self) -> None:
        model = make_model("llama", "fastattn")
        with pytest.raises(fastattn.InputError, match=r'output_attentions: .*attn_implementation="eager"'):
            model(**tokens(), output_attentions=True)
        with pytest.raises(ValueError, match="output_attentions"):
            model.config.output_attentions = True

    def test_attention_weights_that_the_config_asked_for_before(self) -> None:
        with pytest.raises(ValueError, match="output_attentions"):
            output_of(make_model("llama", "fastattn", output_attentions=True), tokens())

    @pytest.mark.parametrize("name", ["cache", "indices", "sinks", "head_mask"])
    def test_what_a_model_passes_and_fastattn_has_not(self, name: str) -> None:
        query = torch.randn(1, 2, 3, 8)
        with pytest.raises(fastattn.InputError, match=rf"^{name}: expected None from Identity"):
            attention_module.attend(torch.nn.Identity(), query, query, query, None, **{name: torch.ones(1)})

    @pytest.mark.parametrize("name", ["", "my_flash", "eager", "sdpa", "paged|sdpa", "kernels-community/x", 3])
    def test_names_that_mean_something_else(self, name: Any) -> None:
        with pytest.raises(fastattn.InputError, match=r"^name: expected"):
            integration.register(name)

    def test_another_name_is_fine_and_so_is_registering_twice(self) -> None:
        integration.register("ours")
        integration.register("ours")
        model = make_model("llama", "ours")
        torch.testing.assert_close(output_of(model, tokens()), output_of(make_model("llama", "eager"), tokens()))
