"""Makes tiny random models of transformers, one of each family that our attention functions support."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads this once, when it is imported

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

logging.set_verbosity_error()  # configs of this size contradict what transformers expects of tokenizers

VOCABULARY = 61
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_MIXTURE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
_ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_start_token_id": 0, "eos_token_id": None}
WINDOW = 4

# name: (model class, config class, config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", _DECODER),
    "modernbert": (  # an encoder with windows to both sides
        "ModernBertModel",
        "ModernBertConfig",
        {**_DECODER, "cls_token_id": None, "sep_token_id": None, "local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_DECODER}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2_moe": (  # its layers do not pass their window to the attention function
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            **_MIXTURE,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gemma2": (  # softcap, and a window in every other layer
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_GROUPED,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 1.5,
        },
    ),
    "gpt_oss": (  # sinks, and a window in every other layer
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "t5": (  # position bias
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_ENCODER_DECODER,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_ENCODER_DECODER,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "forced_eos_token_id": None,
        },
    ),
}
_PEGASUS = {**FAMILIES["bart"][2], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES |= {
    # The decoder layers do not say that they are causal; the encoder layers have their own attention.
    "pegasus_x": ("PegasusXForConditionalGeneration", "PegasusXConfig", _PEGASUS),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", _PEGASUS),
}
ENCODERS = ("bert", "modernbert")
ENCODER_DECODERS = ("t5", "bart", "pegasus_x", "bigbird_pegasus")
DECODERS = tuple(name for name in FAMILIES if name not in ENCODERS + ENCODER_DECODERS)


def make_model(family: str, implementation: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Returns a model whose weights are equal for all ``implementation``s, and make attention far from uniform."""
    model_class, config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**options, **changes})
    model = getattr(transformers, model_class)._from_config(
        config, attn_implementation=implementation, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("bias", "sinks")):  # 1-D weights are those of norms
                parameter.normal_(0, 0.3, generator=generator)
    return model.to(dtype).eval()


def tokens(padding: str = "none", batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Returns ``input_ids``, and for ``padding`` "left" or "right" a mask that pads all rows but the first."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))
    if padding == "none":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1:, slice(0, 3) if padding == "left" else slice(-3, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def output_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Returns logits, or an encoder's last hidden state, of all tokens but padding: ``[tokens, features]``."""
    if model.config.is_encoder_decoder:
        return model(**inputs, decoder_input_ids=inputs["input_ids"][:, :7]).logits.flatten(0, 1)
    outputs = model(**inputs)
    hidden = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    is_token = inputs.get("attention_mask")
    return hidden.flatten(0, 1) if is_token is None else hidden[is_token.bool()]
