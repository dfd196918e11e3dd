"""Attention with few queries over many keys goes to the decoding kernel, and means the same there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import MARKS
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle

pytestmark = MARKS
each_backend = pytest.mark.parametrize("backend", ["cuda", "triton"])
KERNELS = {"cuda": "decode_split_sm80<64, float16>", "triton": "decode.split_kernel"}


def inputs(num_queries: int, num_keys: int = 1100, heads: tuple[int, int] = (4, 2)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((heads[0], num_queries, 40), (heads[1], num_keys, 40), (heads[1], num_keys, 24))
    query, key, value = (torch.randn(2, *shape, generator=generator).to(DEVICE, torch.float16) for shape in shapes)
    return query, key, value


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (300, 0), "softcap": 3.0, "scale": 0.4},
    {"window": (-1, -1), "sinks": torch.tensor([0.5, -1.0, 8.0, 2.0])},
    {"causal": True, "alibi_slopes": torch.rand(2, 4, generator=torch.Generator().manual_seed(1))},
]


@each_backend
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("num_queries", [1, 5])
def test_few_queries_over_many_keys(num_queries: int, options: dict[str, Any], backend: str) -> None:
    query, key, value = inputs(num_queries)
    options = {name: o.to(DEVICE) if isinstance(o, Tensor) else o for name, o in options.items()}
    with fastattn.record() as calls, fastattn.use_backend(backend):
        out, lse = fastattn.attention(query, key, value, return_lse=True, **options)
    assert [call.kernel for call in calls] == [KERNELS[backend]]
    exact, exact_lse = reference.attention(*(t.double() for t in (query, key, value)), **options)
    composite, composite_lse = reference.attention(query, key, value, compute_dtype=torch.float16, **options)
    check_against_oracle("out", out, exact, composite)
    check_against_oracle("lse", lse, exact_lse, composite_lse)


def test_keys_that_cannot_be_read_where_they_lie_are_copied() -> None:
    query, key, value = inputs(2)
    gaps = torch.stack([key, torch.full_like(key, torch.nan)], -1).flatten(-2)[..., ::2]
    assert torch.equal(fastattn.attention(query, gaps, value), fastattn.attention(query, key, value))


def kernel_of(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str:
    return fastattn.explain(fastattn.attention, query, key, value, **options).kernel


def test_what_stays_with_the_tiled_kernel() -> None:
    """More queries or fewer keys, what decoding does not have, and gradients."""
    query, key, value = inputs(16)
    assert kernel_of(query, key, value).startswith("decode")
    for other in (
        kernel_of(*inputs(17)),
        kernel_of(*inputs(16, num_keys=1023)),
        kernel_of(query, key, value, bias=torch.ones(1, 1, 1, 1100, device=DEVICE, dtype=torch.bool)),
        kernel_of(query, key, value, dropout_p=0.5),
        kernel_of(query, key.clone().requires_grad_(), value),
    ):
        assert other.startswith("attention_forward")
    with torch.no_grad():
        assert kernel_of(query, key.clone().requires_grad_(), value).startswith("decode")


def test_the_drop_in_decodes_where_its_mask_is_decodings() -> None:
    """Its causal mask is aligned to the top left: few queries then see few keys."""
    query, key, value = inputs(1, heads=(2, 2))
    drop_in = fastattn.scaled_dot_product_attention
    assert fastattn.explain(drop_in, query, key, value).kernel.startswith("decode")
    assert fastattn.explain(drop_in, query, key, value, is_causal=True).kernel.startswith("attention_forward")
    assert torch.equal(drop_in(query, key, value), fastattn.attention(query, key, value))


def test_vmap_and_compile_keep_to_the_tiled_kernel() -> None:
    query, key, value = inputs(1, heads=(2, 2))
    expected = fastattn.attention(query, key, value)
    for run in (
        torch.func.vmap(lambda q, k, v: fastattn.attention(q[None], k[None], v[None])[0]),
        torch.compile(fastattn.attention, fullgraph=True, backend="eager"),
    ):
        with fastattn.use_backend("cuda"):
            assert torch.allclose(run(query, key, value), expected, rtol=1e-2, atol=1e-3)
