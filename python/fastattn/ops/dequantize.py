"""The operator ``dequantize_cache``, which converts an 8-bit cache to 16-bit floats."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fastattn.ops.registration import call, register


class DequantizeArguments(NamedTuple):
    """The arguments of ``dequantize_cache``.

    Caches, scales, ``seqlens`` (int32 ``[B]``, on the device) and ``block_table`` are those of
    ``attention_with_kv_cache``. ``k_out`` and ``v_out`` are ``[B * max_pages, Hkv, rows, D]``, fp16 or bf16,
    contiguous. Page ``p`` of sequence ``b`` goes to block ``b * max_pages + p``; ``max_pages`` is 1 for a contiguous
    cache. Rows that hold no token of a sequence stay as they were.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    seqlens: Tensor
    block_table: Tensor | None
    k_out: Tensor
    v_out: Tensor


def dequantize_cache(backend: str, arguments: DequantizeArguments) -> None:
    """Writes to ``k_out`` and ``v_out`` in place. It is not differentiable."""
    call(backend, "dequantize_cache", arguments)


def _fake(*args: Any) -> None:
    """Returns nothing, like the operator."""


def _flops(*args: Any, **kwargs: Any) -> int:
    return 0


register(
    "dequantize_cache",
    arguments=DequantizeArguments,
    triton_module="decode_dequantize",
    fake=_fake,
    flops=_flops,
)
