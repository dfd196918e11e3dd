"""Runs a call on the chosen backend: pads head dims, and uses another operation's kernel where that is better."""

from fastattn.run.attention import attention, attention_backward, attention_backward_add
from fastattn.run.int8_linear import int8_linear
from fastattn.run.kv_cache_attention import kv_cache_attention

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_add",
    "int8_linear",
    "kv_cache_attention",
]
