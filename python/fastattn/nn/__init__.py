"""Provides ``Int8Linear``, a linear layer with an int8 weight, and ``quantize_model``, which replaces a model's linear
layers with it."""

from fastattn.functional.int8_tensor import Int8Tensor
from fastattn.nn.int8_linear import Int8Linear, plain_state_dict
from fastattn.nn.quantize_model import QuantizationReport, QuantizedLayer, quantize_model

__all__ = [
    "Int8Linear",
    "Int8Tensor",
    "QuantizationReport",
    "QuantizedLayer",
    "plain_state_dict",
    "quantize_model",
]
