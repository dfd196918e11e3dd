"""Provides flash-attn's interface (2.8): ``import fastattn.integrations.flash_attn as flash_attn``.

Names, argument order, defaults, layouts and conventions are flash-attn's, even where fastattn's own differ:

- layouts are ``[B, S, H, D]`` and ``[total, H, D]``, pages ``[num_pages, page_size, H, D]``; any page size works;
- the lse of a row without keys is +inf; with ALiBi under a causal mask without a left window, the lse lacks
  ``-slope * (i + Sk - Sq)``, because flash-attn adds ``slope * j`` to the scores instead of ``-slope * distance``;
- ``rotary_interleaved`` is True by default; without a causal mask or window, all new queries are rotated by position
  ``cache_seqlens``; otherwise query ``i`` is rotated by ``cache_seqlens + i``, also with ``cache_leftpad``;
- ``S_dmask`` is ``exp(score - largest score of the row)``, negative where dropout removes the weight; its rows and
  columns are padded to multiples of 128, and it is not divided into blocks of keys
  (``flash_attn_interface._get_block_size_n``).

Beyond flash-attn it supports float32 and float64 (in PyTorch), head dims that are no multiple of 8, values whose head
dim differs from that of keys, dropout with every option, gradients through the lse, and the keywords
``learnable_sink``, ``seqused_q``, ``seqused_k`` and ``page_table`` of FlashAttention-3 and -4. Keywords of
FlashAttention-3 and -4 that only control how kernels are launched (``num_splits``, ``pack_gqa``, ``sm_margin``,
``scheduler_metadata``) have no effect. Other keywords raise an error, except ``q_descale``, ``k_descale`` and
``v_descale`` in ``flash_attn_with_kvcache``.

`install_as_flash_attn` puts this module where ``import flash_attn`` finds it.
"""

from __future__ import annotations

from fastattn.integrations.flash_attn import bert_padding, flash_attn_interface
from fastattn.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from fastattn.integrations.flash_attn.installing import install_as_flash_attn, uninstall_as_flash_attn

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install_as_flash_attn",
    "uninstall_as_flash_attn",
]

# The version of the interface. Programs read it to decide which arguments they pass.
__version__ = "2.8.3"
