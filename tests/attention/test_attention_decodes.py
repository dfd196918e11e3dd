"""Tests that attention with few queries over many keys runs on the decoding kernel, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

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
    """Calls with more queries, fewer keys, options that decoding lacks, or gradients stay with the tiled kernel."""
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
    """The drop-in's causal mask is aligned to the top left, where few queries see few keys."""
    query, key, value = inputs(1, heads=(2, 2))
    drop_in = fastattn.scaled_dot_product_attention
    assert fastattn.explain(drop_in, query, key, value).kernel.startswith("decode")
    assert fastattn.explain(drop_in, query, key, value, is_causal=True).kernel.startswith("attention_forward")
    assert torch.equal(drop_in(query, key, value), fastattn.attention(query, key, value))


@each_backend
def test_the_operator_maps(backend: str) -> None:
    """An operator of an exported graph works under vmap over its tensors, with options shared by all."""
    query, key, value = inputs(3)
    sinks = torch.tensor([0.5, -1.0, 8.0, 2.0], device=DEVICE)
    namespace = {"cuda": torch.ops.fastattn, "triton": torch.ops.fastattn_triton}[backend]

    def attend(*tensors: Tensor) -> Any:
        return namespace.attention_split_keys(*tensors, None, sinks, 0.2, -1, 0, 0.0)

    expected = attend(query, key, value)
    mapped = torch.vmap(attend)(*(tensor.unsqueeze(1) for tensor in (query, key, value)))
    for ours, theirs in zip(mapped, expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, rtol=0, atol=2e-3)


def test_vmap_keeps_to_the_tiled_kernel() -> None:
    query, key, value = inputs(1, heads=(2, 2))
    expected = fastattn.attention(query, key, value)
    mapped = torch.func.vmap(lambda q, k, v: fastattn.attention(q[None], k[None], v[None])[0])
    with fastattn.use_backend("cuda"):
        assert torch.allclose(mapped(query, key, value), expected, rtol=1e-2, atol=1e-3)


def operators_of(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch takes every graph for an exported one"
)
@each_backend
def test_compiled_graphs_decode_and_copy_nothing(backend: str) -> None:
    """Few keys lead to a second graph, with the tiled kernel; 1200 keys reuse the graph of 1100."""
    torch._dynamo.reset()
    namespace = {"cuda": "fastattn", "triton": "fastattn_triton"}[backend]
    graphs: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(operators_of(graph))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda *tensors: fastattn.attention(*tensors, causal=True),
        fullgraph=True,
        dynamic=True,
        backend=aot_autograd(fw_compiler=keep),
    )
    with fastattn.use_backend(backend), torch.no_grad():
        for num_keys in (1100, 1200, 40):
            tensors = inputs(4, num_keys=num_keys)
            torch.testing.assert_close(compiled(*tensors), fastattn.attention(*tensors, causal=True), rtol=0, atol=1e-2)
    assert [next(op for op in graph if op.startswith(namespace)) for graph in graphs] == [
        f"{namespace}.attention_split_keys.default",
        f"{namespace}.attention_forward.default",
    ]
    assert not any("clone" in op or "copy" in op or "auto_functionalized" in op for graph in graphs for op in graph)


def test_an_exported_program_serves_every_length() -> None:
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return fastattn.attention(query, key, value)

    of_keys = {2: torch.export.Dim("keys", min=2, max=5000)}
    with fastattn.use_backend("cuda"), torch.no_grad():
        program = torch.export.export(Attend(), inputs(1), dynamic_shapes=(None, of_keys, of_keys))
        fixed = torch.export.export(Attend(), inputs(1))
        for num_keys in (1100, 60):
            tensors = inputs(1, num_keys=num_keys)
            torch.testing.assert_close(program.module()(*tensors), fastattn.attention(*tensors), rtol=0, atol=1e-2)
    assert "fastattn.attention_forward.default" in operators_of(program.graph_module)
    assert "fastattn.attention_split_keys.default" in operators_of(fixed.graph_module)
