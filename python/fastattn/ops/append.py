"""The operator ``append_to_cache``, which writes tokens into the slots of a paged cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fastattn.ops.registration import call, register


class AppendArguments(NamedTuple):
    """The arguments of ``append_to_cache``, which are those of the public function."""

    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def append_to_cache(backend: str, arguments: AppendArguments) -> None:
    """Writes tokens to the caches and their scales in place. It is not differentiable."""
    call(backend, "append_to_cache", arguments)


def _fake(*args: Any) -> None:
    """Returns nothing, like the operator."""


def _flops(*args: Any, **kwargs: Any) -> int:
    return 0


register("append_to_cache", arguments=AppendArguments, triton_module="decode_append", fake=_fake, flops=_flops)
