"""Hand-written CUDA C++ and Triton kernels for attention and int8 linear layers, with PyTorch's interfaces.

Importing this package replaces nothing; ``install()`` or ``with patch_sdpa():`` put its attention in place of
``torch.nn.functional.scaled_dot_product_attention``.
"""

from __future__ import annotations

from fastattn import nn
from fastattn.cache.contiguous import KVCache
from fastattn.cache.paged import PagedKVCache
from fastattn.dispatch.choose import use_backend
from fastattn.dispatch.explain import Explanation, explain, record
from fastattn.errors import CacheFull, InputError
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.int8_linear import Int8Weight, int8_linear, quantize_int8
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.functional.sdpa import scaled_dot_product_attention
from fastattn.patch import install, patch_sdpa, uninstall
from fastattn.profiler.profile import profile

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
