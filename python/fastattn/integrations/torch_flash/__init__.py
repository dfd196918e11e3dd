"""torch's own flash attention, computed by fastattn: ``torch_flash.enable()``.

It puts fastattn's kernels behind the CUDA implementations of ``aten::_scaled_dot_product_flash_attention`` and
``aten::_flash_attention_forward`` and their backward operators, through torch's registry
(``torch.nn.attention.activate_flash_attention_impl("fastattn")`` does the same). So they get every call that torch
sends there: from functions imported by name, ``nn.MultiheadAttention``, ``varlen_attn``, nested tensors, context
parallel.
"""

from __future__ import annotations

from fastattn.integrations.torch_flash.switch import disable, enable, is_available
from fastattn.integrations.torch_flash.varlen import varlen_attn

__all__ = ["disable", "enable", "is_available", "varlen_attn"]
