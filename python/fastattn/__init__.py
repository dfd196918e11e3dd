"""Hand-written CUDA C++ and Triton kernels for attention and int8 linear layers, with PyTorch's interfaces.

Importing this package replaces nothing; ``install()`` or ``with patch_sdpa():`` put its attention in place of
``torch.nn.functional.scaled_dot_product_attention``.
"""

from __future__ import annotations

from fastattn import nn
from fastattn.attention import attention, attention_varlen
from fastattn.decode import attention_with_kv_cache
from fastattn.dispatch import use_backend
from fastattn.errors import CacheFull, InputError
from fastattn.explain import Explanation, explain, record
from fastattn.int8 import Int8Weight, int8_linear, quantize_int8
from fastattn.kv_cache import KVCache
from fastattn.paged_kv_cache import PagedKVCache
from fastattn.patch import install, patch_sdpa, uninstall
from fastattn.profiling import profile
from fastattn.sdpa import scaled_dot_product_attention

__all__ = [
    "CacheFull",
    "Explanation",
    "InputError",
    "Int8Weight",
    "KVCache",
    "PagedKVCache",
    "attention",
    "attention_varlen",
    "attention_with_kv_cache",
    "explain",
    "install",
    "int8_linear",
    "nn",
    "patch_sdpa",
    "profile",
    "quantize_int8",
    "record",
    "scaled_dot_product_attention",
    "uninstall",
    "use_backend",
]
