"""Tests PyTorch's machinery on CUDA tensors: Inductor, export, functorch, autocast, checkpointing, the drop-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.dispatch import device

BACKENDS = ("cuda", "triton")
DTYPE = torch.float16


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)


def draw(*shape: int, grad: bool = False, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


class Block(nn.Module):
    """A transformer block with fastattn's attention."""

    def __init__(self, dim: int = 64, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.causal = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = fastattn.attention(q, k, v, causal=self.causal, softcap=20.0)
        return x + self.out(F.gelu(attended.transpose(1, 2).flatten(2)))


def results(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.float().cos().sum(), [x for x in inputs if x.requires_grad])]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor_compiles_forward_and_backward(backend: str) -> None:
    """The graph has no break; Inductor's kernels for the rest of the block run on the device, too."""
    block = Block().to("cuda", DTYPE)
    x = draw(2, 24, 64, grad=True)
    with fastattn.use_backend(backend):
        expected = results(block, [x])
        compiled = torch.compile(block, fullgraph=True)
        assert_close(results(compiled, [x]), expected)


def test_a_compiled_call_takes_the_backend_that_is_forced() -> None:
    ran: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets = [node.target for node in graph.graph.nodes]
        ran.append({op.namespace for op in targets if isinstance(op, torch._ops.OpOverload)})
        return graph

    compiled = torch.compile(lambda x: fastattn.attention(x, x, x, softcap=5.0), fullgraph=True, backend=keep)
    x = draw(1, 2, 8, 32)
    compiled(x)
    for backend in ("torch", "triton"):
        with fastattn.use_backend(backend):
            compiled(x)
    assert ran == [{"fastattn"}, set(), {"fastattn_triton"}]


def test_the_first_graph_of_a_process_serves_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uncompiled call between them caches facts about the device, which must not cause another compilation."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(device, "_known", {})
    compiled = torch.compile(lambda x: fastattn.attention(x, x, x), fullgraph=True, backend=keep)
    x = draw(1, 2, 8, 32)
    compiled(x)
    fastattn.attention(x, x, x)
    compiled(x)
    assert len(graphs) == 1


def test_a_prompt_over_a_cache_compiles() -> None:
    query, cache = draw(1, 2, 70, 64), draw(1, 2, 96, 64)
    lengths = torch.tensor([90], dtype=torch.int32, device="cuda")

    def attend(query: Tensor) -> Any:
        return fastattn.attention_with_kv_cache(query, cache, cache, lengths)

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="eager")(query), attend(query))


def test_inductor_compiles_a_step_of_generation_and_an_int8_layer() -> None:
    layer = fastattn.nn.Int8Linear.from_linear(nn.Linear(128, 96, dtype=DTYPE)).to("cuda")
    caches = [[draw(2, 2, 40, 64) for _ in range(2)] for _ in range(2)]
    caches[1] = [cache.clone() for cache in caches[0]]
    lengths = torch.tensor([3, 30], dtype=torch.int32, device="cuda")

    def step(query: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = fastattn.attention_with_kv_cache(query, k_cache, v_cache, lengths, k_new=k, v_new=v)
        return layer(out.transpose(1, 2).flatten(2) * 2)

    new = [draw(2, 2, 1, 64) for _ in range(3)]
    expected = step(*new, *caches[0])
    got = torch.compile(step, fullgraph=True)(*new, *caches[1])
    assert_close([got, *caches[1]], [expected, *caches[0]])


def test_dropout_is_drawn_within_a_compiled_graph() -> None:
    query, key, value = (draw(1, 2, 32, 32) for _ in range(3))
    drop = torch.compile(lambda q, k, v: fastattn.attention(q, k, v, dropout_p=0.5), fullgraph=True)
    first, second = drop(query, key, value), drop(query, key, value)
    assert not torch.equal(first, second) and not first.isnan().any()


def test_an_exported_program_runs() -> None:
    block = Block().to("cuda", DTYPE).eval()
    x = draw(2, 16, 64)
    with torch.no_grad():
        program = torch.export.export(block, (x,))
        assert_close([program.module()(x)], [block(x)])


def test_vmap_and_grad_of_functorch() -> None:
    tensors = [draw(3, 1, 2, 20, 32) for _ in range(3)]
    each = torch.stack([fastattn.attention(*(tensor[i] for tensor in tensors), causal=True) for i in range(3)])
    mapped = torch.vmap(lambda q, k, v: fastattn.attention(q, k, v, causal=True))(*tensors)
    assert_close([mapped], [each])
    query = tensors[0][0]

    def loss(x: Tensor) -> Tensor:
        return fastattn.attention(x, tensors[1][0], tensors[2][0]).float().sin().sum()

    leaf = query.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    assert_close([torch.func.grad(loss)(query)], [leaf.grad])


def test_autocast_and_checkpointing() -> None:
    block = Block().to("cuda")  # float32 parameters
    x = draw(2, 24, 64, grad=True, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16), fastattn.record() as calls:
        expected = results(block, [x])
        again = results(lambda x: checkpoint(block, x, use_reentrant=False), [x])
    assert {call.backend for call in calls} == {"cuda"}
    for got, want in zip(again, expected, strict=True):
        assert torch.equal(got, want)


def test_tritons_gradients_beside_a_mask_and_dropout() -> None:
    """Heads are so wide that products loop over 16 keys or rows at a time."""
    inputs = [draw(1, 1, 40, 256, grad=True) for _ in range(3)]
    mask = torch.rand(1, 1, 40, 40, device="cuda") < 0.8
    options: dict[str, Any] = {"bias": mask, "dropout_p": 0.5, "dropout_seed": 7}
    found = []
    for backend in ("triton", "torch"):
        with fastattn.use_backend(backend):
            found.append(results(lambda *qkv: fastattn.attention(*qkv, **options), inputs))
    assert_close(*found)


# --- The drop-in ---


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_drop_in_is_torchs(backend: str, is_causal: bool) -> None:
    inputs = [draw(2, heads, rows, 64, grad=True) for heads, rows in ((4, 33), (2, 40), (2, 40))]

    def attend(function: Callable[..., Tensor]) -> list[Tensor]:
        return results(lambda q, k, v: function(q, k, v, is_causal=is_causal, enable_gqa=True), inputs)

    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(F.scaled_dot_product_attention)
    with fastattn.use_backend(backend):
        assert_close(attend(fastattn.scaled_dot_product_attention), expected)


@pytest.fixture
def _installed() -> Iterator[None]:
    fastattn.install()
    yield
    fastattn.uninstall()


def test_a_layer_of_torchs_trains_through_the_patch() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 96, dropout=0.0, batch_first=True).to("cuda", DTYPE)
    x = draw(2, 20, 64, grad=True)
    expected = results(layer, [x])
    with fastattn.patch_sdpa(), fastattn.record() as calls:
        got = results(layer, [x])
    assert [call.backend for call in calls] == ["cuda", "cuda"]
    assert_close(got, expected)


@pytest.mark.usefixtures("_installed")
def test_torchs_fast_path_of_evaluation_comes_here_too() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True).to("cuda", DTYPE).eval()
    with torch.no_grad(), fastattn.record() as calls:
        layer(draw(2, 20, 64))
    assert [call.backend for call in calls] == ["cuda"]
