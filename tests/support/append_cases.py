"""Makes calls of ``append_to_cache`` and computes what the caches hold afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import proof
from decode_cases import aligned_rows, comparable, spoil
from fastattn import reference
from fastattn.quantization import FP8
from kernel_device import DEVICE

CACHES = ("k_cache", "v_cache")
SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Case:
    """One call. Tokens with ``absent`` slots are written nowhere. Caches hold NaN; int8 caches 99, scaled by NaN."""

    name: str
    tokens: int = 21
    kv_heads: int = 2
    dims: tuple[int, int] = (64, 64)
    num_pages: int = 5
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    int8: bool = False
    fp8: str = ""  # as in decode_cases.Case
    slot_dtype: torch.dtype = torch.int64
    absent: tuple[int, ...] = ()
    magnitude: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-seed{self.seed}"


def make_arguments(case: Case) -> dict[str, Any]:
    """Returns the arguments: slots in random order, with the absent ones at random positions among them."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(dim: int) -> Tensor:
        rows = torch.randn(case.tokens, case.kv_heads, dim, generator=generator)
        return (case.magnitude * rows).to(case.dtype)

    num_slots = case.num_pages * case.page_size
    slots = torch.randperm(num_slots, generator=generator)[: case.tokens].to(case.slot_dtype)
    places = torch.randperm(case.tokens, generator=generator)[: len(case.absent)]
    slots[places] = torch.tensor(case.absent, dtype=case.slot_dtype)
    shape = case.num_pages, case.kv_heads, case.page_size
    arguments: dict[str, Any] = {"k_new": normal(case.dims[0]), "v_new": normal(case.dims[1])}
    for name, dim in zip(CACHES, case.dims, strict=True):
        kind = torch.int8 if case.int8 else FP8 if case.fp8 else case.dtype
        arguments[name] = aligned_rows(torch.full((*shape, dim), 99, dtype=torch.int8).to(kind))
        if not case.int8:
            spoil(arguments[name])
    arguments["slot_mapping"] = slots
    for name in SCALES:
        arguments[name] = torch.full(shape, math.nan) if case.int8 or case.fp8 == "tokens" else None
        if case.fp8 in ("heads", "tensor"):
            arguments[name] = 0.3 + torch.rand((case.kv_heads,) if case.fp8 == "heads" else (), generator=generator)
    return {name: value if value is None else _on_device(value) for name, value in arguments.items()}


def _on_device(tensor: Tensor) -> Tensor:
    """Moves a tensor and keeps its strides, where ``to`` would drop the padding behind its rows."""
    if DEVICE == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


def expected(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Returns what the caches and scales must hold afterwards, computed token by token."""
    after = {name: arguments[name].clone() for name in (*CACHES, *SCALES) if arguments[name] is not None}
    num_pages, _, page_size, _ = arguments["k_cache"].shape
    for cache, scale, new in zip(CACHES, SCALES, (arguments["k_new"], arguments["v_new"]), strict=True):
        scales = None
        if arguments[cache].dtype == FP8:
            given = arguments[scale]
            if given is None or given.dim() < 3:
                new = reference.to_fp8(new, given if given is None else given.reshape(-1, 1))
            else:
                new, scales = reference.quantize_rows_fp8(new)
        elif scale in after:
            new, scales = reference.quantize_rows(new)
        for token, slot in enumerate(arguments["slot_mapping"].tolist()):
            if 0 <= slot < num_pages * page_size:
                page, row = divmod(slot, page_size)
                after[cache][page, :, row] = new[token]
                if scales is not None:
                    after[scale][page, :, row] = scales[token]
    return after


def check_caches(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Asserts that the caches and scales are equal bit for bit."""
    proof.compared()
    for name, tensor in wanted.items():
        found_tensor, wanted_tensor = comparable(found[name]), comparable(tensor)
        torch.testing.assert_close(
            found_tensor, wanted_tensor, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
