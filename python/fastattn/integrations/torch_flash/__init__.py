"""Makes torch's own flash attention run fastattn's kernels: ``torch_flash.enable()``.

This replaces the CUDA implementations of ``aten::_scaled_dot_product_flash_attention`` and
``aten::_flash_attention_forward`` and their backward operators, through torch's registry
(``torch.nn.attention.activate_flash_attention_impl("fastattn")`` does the same). fastattn then gets every call that
torch sends to these operators: from functions imported by name, ``nn.MultiheadAttention``, ``varlen_attn``, nested
tensors, and torch's context parallel.
"""

from __future__ import annotations

from fastattn.integrations.torch_flash.switch import disable, enable, is_available
from fastattn.integrations.torch_flash.varlen import varlen_attn

__all__ = ["disable", "enable", "is_available", "varlen_attn"]
