"""Hand-written CUDA C++ and Triton kernels for attention and int8 linear layers, with PyTorch's interfaces.

Importing this package replaces nothing; ``install()`` or ``with patch_sdpa():`` put its attention in place of
``torch.nn.functional.scaled_dot_product_attention``.
"""

from __future__ import annotations

from fastattn.attention import attention, attention_varlen
from fastattn.dispatch import use_backend
from fastattn.errors import InputError
from fastattn.explain import Explanation, explain, record
from fastattn.patch import install, patch_sdpa, uninstall
from fastattn.sdpa import scaled_dot_product_attention

__all__ = [
    "Explanation",
    "InputError",
    "attention",
    "attention_varlen",
    "explain",
    "install",
    "patch_sdpa",
    "record",
    "scaled_dot_product_attention",
    "uninstall",
    "use_backend",
]
