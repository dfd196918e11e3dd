"""Computes every operation by its mathematical definition, in plain PyTorch.

Tests compare results with the reference in float64. The reference also runs calls that no kernel supports. It
materialises the scores, so it needs O(Sq * Sk) memory. Arguments and results have the same shapes and meanings as in
the public functions of the same names. Every function takes any floating dtype up to float64, and computes in at least
float32 unless ``compute_dtype`` is given.
"""

from fastattn.quantization import dequantize_int8, quantize_int8, quantize_rows, quantize_rows_fp8, to_fp8
from fastattn.reference.attention import attention, attention_varlen
from fastattn.reference.dropout import dropout_keep, philox_4x32
from fastattn.reference.formula import mask_of_ranges
from fastattn.reference.int8_linear import int8_linear
from fastattn.reference.kv_cache import append_to_cache, attention_with_kv_cache
from fastattn.reference.merge import merge_attention
from fastattn.rotary import rotary

__all__ = [
    "append_to_cache",
    "attention",
    "attention_varlen",
    "attention_with_kv_cache",
    "dequantize_int8",
    "dropout_keep",
    "int8_linear",
    "mask_of_ranges",
    "merge_attention",
    "philox_4x32",
    "quantize_int8",
    "quantize_rows",
    "quantize_rows_fp8",
    "rotary",
    "to_fp8",
]
