"""Tests ``transformers.Cache`` of the integration: eager's tokens; in 8 bits, eager's over rounded keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache as AnyCache
from transformers import DynamicCache, EncoderDecoderCache, RecurrentGemmaConfig
from transformers.cache_utils import DynamicLayer

import fastattn
from fastattn.integrations import transformers as integration
from fastattn.quantization import quantize_rows, quantize_rows_fp8
from tiny_models import DECODERS, ENCODER_DECODERS, make_model, tokens

OPTIONS = {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
EXACT = {"rtol": 2e-4, "atol": 2e-5}
QUANTIZE = {"int8": quantize_rows, "fp8": quantize_rows_fp8}
each_dtype = pytest.mark.parametrize("dtype", [None, *QUANTIZE])


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def rounded(states: Tensor, dtype: str) -> Tensor:
    values, scale = QUANTIZE[dtype](states)
    return (values.to(scale.dtype) * scale[..., None]).to(states.dtype)


class RoundedLayer(DynamicLayer):
    """A layer that keeps rounded states in the model's dtype, and attends to a prompt before rounding it."""

    stored_as = "int8"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        is_prompt = self.get_seq_length() == 0
        found = super().update(*(rounded(states, self.stored_as) for states in (key_states, value_states)))
        return (key_states, value_states) if is_prompt else found


class LayerRoundedToFp8(RoundedLayer):
    stored_as = "fp8"


LAYERS = {None: DynamicLayer, "int8": RoundedLayer, "fp8": LayerRoundedToFp8}


def reference_cache(dtype: str | None) -> AnyCache:
    return AnyCache(layer_class_to_replicate=LAYERS[dtype])


def make_cache(model: Any, dtype: str | None, batch_size: int = 2, max_length: int = 20) -> integration.Cache:
    return integration.Cache(model.config, batch_size=batch_size, max_length=max_length, dtype=dtype)


class TestGenerate:
    @each_dtype
    @pytest.mark.parametrize("padding", ["none", "left"])
    @pytest.mark.parametrize("family", DECODERS)
    def test_gives_eagers_tokens(self, family: str, padding: str, dtype: str | None) -> None:
        eager, ours = make_model(family, "eager"), make_model(family, "fastattn")
        wanted = eager.generate(**tokens(padding), past_key_values=reference_cache(dtype), **OPTIONS)
        came = ours.generate(**tokens(padding), past_key_values=make_cache(ours, dtype), **OPTIONS)
        assert torch.equal(came, wanted)

    @each_dtype
    def test_beams(self, dtype: str | None) -> None:
        eager, ours = make_model("mistral", "eager"), make_model("mistral", "fastattn")
        options = {**OPTIONS, "num_beams": 3}
        wanted = eager.generate(**tokens("left"), past_key_values=reference_cache(dtype), **options)
        came = ours.generate(**tokens("left"), past_key_values=make_cache(ours, dtype, batch_size=6), **options)
        assert torch.equal(came, wanted)

    @pytest.mark.parametrize(("family", "dtype"), [("bart", None), ("bart", "int8"), ("bart", "fp8"), ("t5", None)])
    def test_encoder_decoders(self, family: str, dtype: str | None) -> None:
        eager, ours = make_model(family, "eager"), make_model(family, "fastattn")
        caches = (reference_cache(dtype), make_cache(ours, dtype))
        wanted, came = (
            model.generate(**tokens("right"), past_key_values=EncoderDecoderCache(cache, DynamicCache()), **OPTIONS)
            for model, cache in zip((eager, ours), caches, strict=True)
        )
        assert torch.equal(came, wanted)
        assert family in ENCODER_DECODERS

    @each_dtype
    def test_again_after_a_reset(self, dtype: str | None) -> None:
        model = make_model("llama", "fastattn")
        cache = make_cache(model, dtype)
        first = model.generate(**tokens(), past_key_values=cache, **OPTIONS)
        memory = cache.layers[0].keys.data_ptr()
        cache.reset()
        assert torch.equal(model.generate(**tokens(), past_key_values=cache, **OPTIONS), first)
        assert cache.layers[0].keys.data_ptr() == memory


def logits_in_chunks(model: Any, ids: Tensor, mask: Tensor | None, cache: AnyCache, ends: tuple[int, ...]) -> Tensor:
    parts, begin = [], 0
    for end in ends:
        part_mask = None if mask is None else mask[:, :end]
        parts.append(model(ids[:, begin:end], attention_mask=part_mask, past_key_values=cache).logits)
        begin = end
    return torch.cat(parts, 1)


@each_dtype
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_prompts_in_chunks(family: str, padding: str, dtype: str | None) -> None:
    eager, ours = make_model(family, "eager"), make_model(family, "fastattn")
    # gpt_oss's twelfth token has a value halfway between two int8 numbers, where float32's error decides.
    inputs, ends = tokens(padding, length=11), (5, 6, 9, 11)
    mask = inputs.get("attention_mask")
    wanted = logits_in_chunks(eager, inputs["input_ids"], mask, reference_cache(dtype), ends)
    came = logits_in_chunks(ours, inputs["input_ids"], mask, make_cache(ours, dtype), ends)
    is_token = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
    torch.testing.assert_close(came[is_token], wanted[is_token], **EXACT)


@each_dtype
@torch.no_grad()
def test_cropped_and_selected_caches_go_on(dtype: str | None) -> None:
    model = make_model("llama", "fastattn")
    ids = tokens(length=10)["input_ids"]
    cache = make_cache(model, dtype)
    assert cache.is_croppable and cache.is_compileable and cache.get_max_length() == 20
    wanted = logits_in_chunks(model, ids, None, cache, (6, 10))[:, 6:]
    cache.crop(-4)
    assert int(cache.get_seq_length()) == 6
    torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, wanted)
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(model(ids.flip(0)[:, 6:], past_key_values=cache).logits, wanted.flip(0))
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    rows = torch.tensor([1, 1, 0, 0])
    torch.testing.assert_close(model(ids[rows][:, 6:], past_key_values=cache).logits, wanted[rows])
    cache.crop(-4)
    cache.batch_select_indices(torch.tensor([2, 0, 1]))
    rows = torch.tensor([0, 1, 1])
    torch.testing.assert_close(model(ids[rows][:, 6:], past_key_values=cache).logits, wanted[rows])


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("padding", ["none", "left"])
@torch.no_grad()
def test_a_compiled_step_without_breaks(padding: str, dtype: str | None) -> None:
    torch._dynamo.reset()
    model = make_model("llama", "fastattn")
    inputs = tokens(padding)
    mask = inputs.get("attention_mask")
    wanted = logits_in_chunks(model, inputs["input_ids"], mask, make_cache(model, dtype), (6, 7, 8, 9))
    step = torch.compile(model, fullgraph=True, backend="eager")
    cache = make_cache(model, dtype)
    parts = [
        model(inputs["input_ids"][:, :6], attention_mask=None if mask is None else mask[:, :6], past_key_values=cache)
    ]
    for end in (7, 8, 9):
        whole = None if mask is None else mask[:, :end]
        parts.append(step(inputs["input_ids"][:, end - 1 : end], attention_mask=whole, past_key_values=cache))
    is_token = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1)[is_token], wanted[is_token], **EXACT)


@pytest.mark.parametrize(("dtype", "stored"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_an_element_takes_a_byte_and_a_token_a_scale(dtype: str, stored: torch.dtype) -> None:
    model = make_model("llama", "fastattn", head_dim=16)
    cache = make_cache(model, dtype)
    model.generate(**tokens(), past_key_values=cache, **OPTIONS)
    layer = cache.layers[0]
    assert layer.keys.dtype == stored and layer.keys.shape == (2, 2, 20, 16)
    assert layer.keys.untyped_storage().nbytes() == layer.keys.numel()


@torch.no_grad()
def test_a_mask_that_is_written_to_is_read_again() -> None:
    model = make_model("llama", "fastattn")
    ids = tokens()["input_ids"]
    mask = torch.zeros(2, 1, 1, 20, dtype=torch.bool)
    parts, caches = [], [make_cache(model, "int8"), make_cache(model, "int8")]
    for cache in caches:
        model(ids[:, :7], past_key_values=cache)
    for step in (7, 8):
        mask[..., 2 : step + 1] = True
        parts.append(
            [
                model(ids[:, step : step + 1], attention_mask=each, past_key_values=cache).logits
                for each, cache in zip((mask, mask.clone()), caches, strict=True)
            ]
        )
    for came, wanted in parts:
        torch.testing.assert_close(came, wanted)


def test_the_dtype_can_be_torchs() -> None:
    config = make_model("llama", "eager").config
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert integration.Cache(config, batch_size=2, max_length=8, dtype=dtype).layers[0].eight_bit == dtype


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"batch_size": 0}, r"^batch_size: expected at least 1"),
            ({"max_length": 2.5}, r"^max_length: expected an int"),
            ({"dtype": "int4"}, r"^dtype: expected one of None, 'int8', 'fp8'"),
            (
                {"config": make_model("llama", "eager")},
                r"^config: expected .* got .*LlamaForCausalLM; pass model\.config",
            ),
            ({"config": RecurrentGemmaConfig()}, r"^config: expected layers .* leave the cache out, and generate\(\)"),
        ],
        ids=["batch size", "length", "dtype", "model", "layers"],
    )
    def test_of_wrong_arguments(self, changes: dict[str, Any], error: str) -> None:
        config = make_model("llama", "eager").config
        with pytest.raises((fastattn.InputError, TypeError), match=error):
            integration.Cache(**{"config": config, "batch_size": 2, "max_length": 8, **changes})

    def test_of_another_batch(self) -> None:
        model = make_model("llama", "fastattn")
        with pytest.raises(fastattn.InputError, match=r"^batch_size: expected 2, the sequences .* got 3"):
            model(**tokens(), past_key_values=make_cache(model, None, batch_size=3))

    def test_of_more_tokens_than_it_has_room_for(self) -> None:
        model = make_model("llama", "fastattn")
        with pytest.raises(fastattn.CacheFull, match="room for 8 tokens of a sequence; 0 are there, and 9 come"):
            model(**tokens(), past_key_values=make_cache(model, None, max_length=8))
        cache = make_cache(model, "int8", max_length=10)
        model(**tokens(), past_key_values=cache)
        before = [tensor.clone() for tensor in cache.layers[0]._tensors()]
        with pytest.raises(fastattn.CacheFull, match="9 are there, and 2 come"):
            model(**tokens(length=2), past_key_values=cache)
        assert all(torch.equal(*pair) for pair in zip(before, cache.layers[0]._tensors(), strict=True))
        assert int(cache.get_seq_length()) == 9

    @torch.no_grad()
    def test_of_what_int8_lacks(self) -> None:
        model = make_model("t5", "fastattn")
        cache = EncoderDecoderCache(make_cache(model, "int8"), DynamicCache())
        with pytest.raises(fastattn.InputError, match=r"^position_bias: expected None over an 8-bit cache"):
            model.generate(**tokens(), past_key_values=cache, **OPTIONS)
        model = make_model("llama", "fastattn")
        cache = make_cache(model, "int8", max_length=30)
        model(**tokens(), past_key_values=cache)
        words = r"^attention_mask: expected one that only hides padding and later tokens.* Cache\(\.\.\., dtype=None\)"
        with pytest.raises(fastattn.InputError, match=words):
            model(**tokens(), attention_mask=torch.ones(2, 1, 9, 30, dtype=torch.bool), past_key_values=cache)
        model = make_model("llama", "fastattn", attention_dropout=0.1).train()
        cache.reset()
        model(**tokens(), past_key_values=cache)  # a prompt is attended to before rounding
        with pytest.raises(fastattn.InputError, match=r"^dropout: expected 0 over an 8-bit cache"):
            model(**tokens(), past_key_values=cache)
