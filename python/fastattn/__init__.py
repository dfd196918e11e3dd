"""Computes attention and int8 linear layers for PyTorch with hand-written CUDA C++ and Triton kernels.

Importing this package changes nothing in torch. ``install()``, or ``with patch_sdpa():`` for a block, replaces
``torch.nn.functional.scaled_dot_product_attention`` with the package's own function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastattn import masks, native, nn
from fastattn.cache.contiguous import KVCache
from fastattn.cache.paged import PagedKVCache
from fastattn.cache.protocol import StepCache
from fastattn.dispatch.recording import record
from fastattn.dispatch.thread_state import use_backend
from fastattn.errors import CacheFull, InputError
from fastattn.explain import Explanation, explain
from fastattn.functional.append_to_cache import append_to_cache
from fastattn.functional.attention import attention, attention_varlen
from fastattn.functional.int8_linear import int8_linear
from fastattn.functional.int8_weight import Int8Weight, quantize_int8
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.functional.sdpa import scaled_dot_product_attention
from fastattn.patch import install, missed_modules, patch_sdpa, uninstall
from fastattn.profiler.profile import profile

if TYPE_CHECKING:
    from fastattn import distributed as distributed
    from fastattn import integrations as integrations

__version__: str = native.BUILD["version"]

__all__ = [
    "CacheFull",
    "Explanation",
    "InputError",
    "Int8Weight",
    "KVCache",
    "PagedKVCache",
    "StepCache",
    "append_to_cache",
    "attention",
    "attention_varlen",
    "attention_with_kv_cache",
    "explain",
    "install",
    "int8_linear",
    "masks",
    "missed_modules",
    "nn",
    "patch_sdpa",
    "profile",
    "quantize_int8",
    "record",
    "scaled_dot_product_attention",
    "uninstall",
    "use_backend",
]

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any attribute name

    def __getattr__(name: str) -> Any:
        """Imports ``distributed`` or ``integrations`` at its first use, because most programs need neither."""
        if name in ("distributed", "integrations"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
