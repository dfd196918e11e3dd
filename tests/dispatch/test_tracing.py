"""Tests PyTorch's machinery on the public functions: compile, export, functorch, autocast, checkpoint, opcheck, FLOPs.

Kernels run on a GPU if there is one, else on the emulator. The PyTorch path is tested, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from cuda_kernels import HAS_KERNELS, NO_KERNELS
from fastattn import reference
from fastattn.call import AttentionCall
from fastattn.dispatch.request import Choice
from fastattn.ops.attention import is_deterministic
from kernel_device import DEVICE

pytestmark = pytest.mark.usefixtures("emulated_gpu")

SEED = 31


@pytest.fixture(params=["torch", "triton", "cuda"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    with torch.device(DEVICE), fastattn.use_backend(request.param):
        yield request.param


def draw(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float16, requires_grad=requires_grad)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fastattn.attention(query, key, value, causal=True, softcap=5.0)


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Any:
    return fastattn.attention(query, key, value, bias=bias, sinks=sinks, window=(3, 1), return_lse=True)


def drop_in(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def packed(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    return fastattn.attention_varlen(query, key, value, offsets, offsets, 6, 6, causal=True)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "attention": (attend, lambda: [draw(1, 2, 5, 16, requires_grad=True) for _ in range(3)]),
    "head dims that are padded": (attend, lambda: [draw(1, 2, 5, dim, requires_grad=True) for dim in (20, 20, 12)]),
    "attention with lse": (
        attend_with_lse,
        lambda: [
            *(draw(1, 2, 5, 16, requires_grad=True) for _ in range(3)),
            draw(1, 1, 5, 5, requires_grad=True),
            draw(2, requires_grad=True),
        ],
    ),
    "scaled_dot_product_attention": (
        drop_in,
        lambda: [draw(1, 4, 5, 16, requires_grad=True), *(draw(1, 2, 7, 16, requires_grad=True) for _ in range(2))],
    ),
    "attention_varlen": (
        packed,
        lambda: [
            *(draw(9, 2, 16, requires_grad=True) for _ in range(3)),
            torch.tensor([0, 4, 4, 9], dtype=torch.int32),
        ],
    ),
}


def outputs_and_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weighted = [(out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum() for out in outputs]
    return [*outputs, *torch.autograd.grad(sum(weighted[1:], weighted[0]), [t for t in inputs if t.requires_grad])]


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_graph_breaks(name: str, backend: str) -> None:
    function, make = CALLS[name]
    inputs = make()
    if backend == "torch" and name == "attention_varlen":
        # The eager call reads the lengths and runs PyTorch's own attention, which rounds 16-bit numbers elsewhere.
        inputs = [t.detach().float().requires_grad_() if t.is_floating_point() else t for t in inputs]
    expected = outputs_and_gradients(function, inputs)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs), expected)


def test_the_first_call_may_be_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher looks up facts about the device while dynamo traces, too."""
    monkeypatch.setattr(fastattn.dispatch.device, "_known", {})
    query = draw(1, 2, 5, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, query, query), attend(query, query, query))


@pytest.mark.slow
@pytest.mark.parametrize("function", [attend, drop_in])
def test_dynamic_lengths_compile_once(function: Callable[..., Any]) -> None:
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for length in (5, 6, 9, 11):
        inputs = [draw(1, 2, length, 16) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dynamic_lengths_of_packed_sequences_compile_twice(backend: str) -> None:
    """Once for the first lengths, and once for all others, of packed sequences and of a prompt for a cache."""

    def in_packs(query: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return fastattn.attention_varlen(query, query, query, offsets, offsets, longest, longest, causal=True)

    def into_cache(query: Tensor) -> Tensor:
        cache = torch.zeros(1, 2, 128, 16, device=DEVICE, dtype=torch.float16)
        lengths = torch.zeros(1, device=DEVICE, dtype=torch.int32)
        return fastattn.attention_with_kv_cache(query, cache, cache.clone(), lengths, k_new=query, v_new=query)

    for function, make in (
        (in_packs, lambda n: (draw(2 * n, 2, 16), torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE), n)),
        (into_cache, lambda n: (draw(1, 2, 65 + n, 16),)),
    ):
        counter = CompileCounter()
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for length in (5, 6, 9, 11):
            inputs = make(length)
            torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=2e-3)
        assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["attention", "head dims that are padded", "scaled_dot_product_attention"])
def test_exports(name: str) -> None:
    function, make = CALLS[name]

    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            result: Tensor = function(*inputs)
            return result

    inputs = tuple(t.detach() for t in make())
    exported = torch.export.export(Model(), inputs)
    torch.testing.assert_close(exported.module()(*inputs), function(*inputs))


def test_exports_a_mask_per_head_of_any_length() -> None:
    """No guard compares the number of heads with the number of keys, as for a padding mask."""

    class Model(torch.nn.Module):
        def forward(self, query: Tensor, mask: Tensor) -> Tensor:
            return fastattn.attention(query, query, query, bias=mask)

    def inputs(length: int) -> tuple[Tensor, Tensor]:
        return draw(2, 8, length, 32), torch.ones(2, 8, length, length, dtype=torch.bool).tril()

    length = torch.export.Dim("length", min=2, max=64)
    dims = ({2: length}, {2: length, 3: length})
    exported = torch.export.export(Model(), inputs(16), dynamic_shapes=dims, strict=False).module()
    for arguments in (inputs(8), inputs(23)):
        torch.testing.assert_close(exported(*arguments), Model()(*arguments))


@pytest.mark.slow
def test_use_backend_is_guarded(backend: str) -> None:
    """The backends' results differ in the last place only, so the graphs' operators show which backend ran."""
    namespaces: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets = [node.target for node in graph.graph.nodes]
        namespaces.append({op.namespace for op in targets if isinstance(op, torch._ops.OpOverload)})
        return graph

    compiled = torch.compile(attend, fullgraph=True, backend=keep)
    inputs = [draw(1, 2, 5, 16) for _ in range(3)]
    compiled(*inputs)
    own: set[str] = {"torch": set(), "triton": {"fastattn_triton"}, "cuda": {"fastattn"}}[backend]
    with fastattn.use_backend("torch"):
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    assert namespaces[0] == own and namespaces[-1] == set()


@pytest.mark.slow
def test_vmap_equals_a_loop() -> None:
    query, key, value = draw(3, 1, 4, 5, 16), draw(3, 1, 2, 7, 16), draw(3, 1, 2, 7, 16)
    bias, sinks = draw(3, 1, 1, 5, 7), draw(4)

    def one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        return fastattn.attention(query, key, value, bias=bias, sinks=sinks, return_lse=True)

    mapped = torch.vmap(one)(query, key, value, bias)
    for index, expected in enumerate(map(one, query, key, value, bias)):
        torch.testing.assert_close(tuple(part[index] for part in mapped), expected)


def test_vmap_of_padded_head_dims() -> None:
    inputs = [draw(3, 1, 2, 5, 20), draw(3, 1, 2, 7, 20), draw(3, 1, 2, 7, 12)]
    mapped = torch.vmap(attend)(*inputs)
    torch.testing.assert_close(mapped, torch.stack([attend(*sample) for sample in zip(*inputs, strict=True)]))


@pytest.mark.slow
def test_per_sample_gradients() -> None:
    """vmap over grad also gives gradients of inputs that all samples share."""
    query, key = draw(3, 1, 2, 5, 16), draw(3, 1, 2, 5, 16)
    bias, sinks = draw(1, 1, 5, 5), draw(2)

    def loss(query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out = fastattn.attention(query, key, key, bias=bias, sinks=sinks)
        return (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    mapped = torch.vmap(gradient, in_dims=(0, 0, None, None))(query, key, bias, sinks)
    for index in range(3):
        expected = gradient(query[index], key[index], bias, sinks)
        torch.testing.assert_close(tuple(each[index] for each in mapped), expected)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, k: fastattn.attention(q, k, k),
    "drop-in": lambda q, k: fastattn.scaled_dot_product_attention(q, k, k),
    "int8": lambda q, k: fastattn.int8_linear(q + k, fastattn.quantize_int8(torch.eye(16)), activation="silu"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_mapped_function(name: str) -> None:
    """A mapped tensor says that it needs no gradient, even if the tensor beneath needs one."""
    query, key = draw(3, 1, 2, 5, 16, requires_grad=True), draw(3, 1, 2, 5, 16, requires_grad=True)
    function = FUNCTIONS[name]
    got = torch.autograd.grad(torch.vmap(function)(query, key).square().sum(), (query, key))
    want = torch.autograd.grad(sum(function(*one).square().sum() for one in zip(query, key, strict=True)), (query, key))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)  # a kernel may sum in another order
    by_func = torch.func.grad(lambda *tensors: torch.vmap(function)(*tensors).square().sum(), argnums=(0, 1))
    torch.testing.assert_close(by_func(query.detach(), key.detach()), want, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_checkpoint_recomputes_the_same_dropout(backend: str) -> None:
    inputs = [draw(1, 2, 5, 16, requires_grad=True) for _ in range(3)]

    def block(*tensors: Tensor) -> Tensor:
        return fastattn.attention(*tensors, dropout_p=0.5).square()

    torch.manual_seed(5)
    expected = torch.autograd.grad(block(*inputs).sum(), inputs)
    torch.manual_seed(5)

    def contexts() -> Any:  # on a GPU, backward runs in another thread
        return fastattn.use_backend(backend), fastattn.use_backend(backend)

    recomputed: Any = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(torch.autograd.grad(recomputed.sum(), inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", [attend, drop_in])
def test_autocast_decides_the_dtype(function: Callable[..., Any], backend: str) -> None:
    inputs = [draw(1, 2, 5, 16) for _ in range(3)]
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = function(*inputs)
        expected = F.scaled_dot_product_attention(*inputs)
    assert out.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(out, function(*(t.half() for t in inputs)))
    doubles = [t.double() for t in inputs]
    if backend == "torch":
        with torch.autocast(DEVICE, dtype=torch.float16):
            assert function(*doubles).dtype == F.scaled_dot_product_attention(*doubles).dtype == torch.float64


def test_autocast_takes_a_bias_of_another_16_bit_dtype(backend: str) -> None:
    query = draw(1, 2, 5, 16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = fastattn.attention(query, query, query, bias=torch.zeros(1, 1, 5, 5, dtype=torch.float16))
    assert out.dtype == torch.bfloat16


def test_no_heads_with_slopes() -> None:
    query = draw(1, 0, 5, 16)
    assert fastattn.attention(query, query, query, alibi_slopes=torch.zeros(0)).shape == (1, 0, 5, 16)


@pytest.mark.slow
def test_double_backward_is_refused(backend: str) -> None:
    if backend == "torch":
        pytest.skip("PyTorch differentiates its own path as often as one likes")
    query = draw(1, 1, 4, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(query, query, query).sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


# --- the operators themselves ---------------------------------------------------------------------------------------


def forward_arguments(**changes: Any) -> tuple[Any, ...]:
    arguments: dict[str, Any] = {
        "query": draw(1, 4, 5, 16),
        "key": draw(1, 2, 7, 16),
        "value": draw(1, 2, 7, 24),
        "bias": None,
        "alibi_slopes": None,
        "sinks": None,
        "dropout_seed": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "max_seqlen_q": 0,
        "max_seqlen_k": 0,
        "scale": 0.25,
        "window_left": -1,
        "window_right": 0,
        "first_row": None,
        "first_key": 0,
        "first_head": 0,
        "softcap": 0.0,
        "dropout_p": 0.0,
    }
    return tuple({**arguments, **changes}.values())


OP_CALLS: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "forward": ("attention_forward", forward_arguments),
    "forward, transposed layout": (
        "attention_forward",
        lambda: forward_arguments(query=draw(1, 5, 4, 16).transpose(1, 2)),
    ),
    "forward, every option": (
        "attention_forward",
        lambda: forward_arguments(
            bias=draw(1, 4, 5, 1), sinks=draw(4).float(), dropout_seed=torch.tensor(3), dropout_p=0.5, softcap=3.0
        ),
    ),
    "forward, packed": (
        "attention_forward",
        lambda: forward_arguments(
            query=draw(9, 2, 16),
            key=draw(9, 2, 16),
            value=draw(9, 2, 16),
            alibi_slopes=draw(1, 2).float(),
            cu_seqlens_q=torch.tensor([0, 3, 9], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, 4, 9], dtype=torch.int32),
            max_seqlen_q=6,
            max_seqlen_k=5,
        ),
    ),
    "backward": (
        "attention_backward",
        lambda: (
            draw(1, 4, 5, 24),
            draw(1, 4, 5).float(),
            *forward_arguments()[:3],
            draw(1, 4, 5, 24),
            draw(1, 4, 5).float().abs() + 3,
            draw(1, 1, 5, 7),
            None,
            draw(4).float(),
            *(*forward_arguments()[6:], True, True, False),
        ),
    ),
    "backward, slopes": (
        "attention_backward",
        lambda: (
            draw(2, 4, 5, 24),
            None,
            draw(2, 4, 5, 16),
            draw(2, 2, 7, 16),
            draw(2, 2, 7, 24),
            draw(2, 4, 5, 24),
            draw(2, 4, 5).float().abs() + 3,
            None,
            draw(2, 4).float().abs(),
            None,
            *(*forward_arguments()[6:], True, False, True),
        ),
    ),
    "decode": (
        "attention_decode",
        lambda: (
            draw(2, 4, 1, 16),
            draw(2, 2, 12, 16),
            draw(2, 2, 12, 16),
            torch.tensor([3, 11], dtype=torch.int32),
            draw(2, 2, 1, 16),
            draw(2, 2, 1, 16),
            *(None, None, False, None, None, None, None, None),
            *(0.25, -1, -1, 0.0, 0, False),
            torch.ones(2, 1, 1, dtype=torch.bool),
        ),
    ),
    "split keys": (
        "attention_split_keys",
        lambda: (draw(2, 4, 3, 16), draw(2, 2, 12, 16), draw(2, 2, 12, 24), None, draw(4).float(), 0.25, -1, 0, 0.0),
    ),
    "int8": (
        "int8_matmul",
        lambda: (
            draw(3, 32),
            torch.randint(-127, 128, (8, 32), dtype=torch.int8),
            *(draw(8, 1).float(), draw(8), None, "silu"),
        ),
    ),
    "int8 input gradient": (
        "int8_matmul_grad_input",
        lambda: (draw(2, 3, 8), torch.randint(-127, 128, (8, 32), dtype=torch.int8), draw(8, 1).float(), True),
    ),
}


@pytest.mark.parametrize("backend", ["triton", "cuda"], indirect=True)
@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name: str, backend: str) -> None:
    op, make = OP_CALLS[name]
    ops = torch.ops.fastattn if backend == "cuda" else torch.ops.fastattn_triton
    torch.library.opcheck(getattr(ops, op).default, make())


def int8_layer(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return fastattn.int8_linear(x, fastattn.quantize_int8(torch.eye(16)), activation="silu")


@pytest.mark.parametrize("function", [attend, drop_in, int8_layer])
def test_forward_mode_is_torchs(function: Callable[..., Any], backend: str) -> None:
    """A kernel cannot compute tangents: it must refuse, and never return a result without them."""
    inputs = tuple(draw(1, 2, 5, 16) for _ in range(3))
    function(*inputs)  # caches the checked call and the choice
    if backend != "torch":
        with pytest.raises(fastattn.InputError, match="forward-mode"):
            torch.func.jvp(function, inputs, inputs)
        return
    inputs = tuple(t.float() for t in inputs)  # differences in 16 bits would measure nothing
    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = torch.func.jvp(function, inputs, inputs)
    step = 1e-2
    later, earlier = (function(*(t * (1 + sign * step) for t in inputs)) for sign in (1, -1))
    torch.testing.assert_close(tangent, (later - earlier) / (2 * step), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("function", [attend, drop_in])
def test_symbolic_tracers_pass_through(function: Callable[..., Any]) -> None:
    inputs = [draw(1, 2, 5, 16) for _ in range(3)]
    traced = make_fx(function, tracing_mode="symbolic")(*inputs)
    torch.testing.assert_close(traced(*inputs), function(*inputs))


def test_triton_launches_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, wherever the tensors are."""
    current = [0]

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    launched_on: list[int] = []
    launcher = SimpleNamespace(int8_matmul=lambda given: launched_on.append(current[-1]))
    op = SimpleNamespace(name="int8_matmul", Arguments=lambda *args: args)
    monkeypatch.setattr(fastattn.ops.registration.importlib, "import_module", lambda name, package: launcher)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", enter)
    for index in (0, 1):
        fastattn.ops.registration._triton_launcher("int8_matmul", op)(
            SimpleNamespace(device=torch.device("cuda", index))
        )
    assert launched_on == [0, 1]


@pytest.mark.parametrize("namespace", ["fastattn", "fastattn_triton"])
def test_raw_operators_refuse_to_differentiate(namespace: str) -> None:
    arguments = forward_arguments(query=draw(1, 4, 5, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="raw operator has no gradient"):
        getattr(torch.ops, namespace).attention_forward(*arguments)


@pytest.mark.slow
def test_flops_are_counted_as_torch_counts_its_own(backend: str) -> None:
    if backend == "torch":
        pytest.skip("torch counts its own operators")
    query, key = draw(2, 4, 5, 16, requires_grad=True), draw(2, 2, 7, 16, requires_grad=True)
    value = draw(2, 2, 7, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = fastattn.attention(query, key, value)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 2 * 4 * 5 * 7
    assert forward == 2 * pairs * (16 + 24)
    assert counter.get_total_flops() == forward + 2 * pairs * (3 * 16 + 2 * 24)


def test_deterministic_follows_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = fastattn.run.attention

    def attention(choice: Choice, call: AttentionCall, needs_grad: bool) -> Any:
        seen.append(is_deterministic(call))
        return original(choice, call, needs_grad)

    monkeypatch.setattr(fastattn.run, "attention", attention)
    query = draw(1, 1, 3, 16)
    fastattn.attention(query, query, query, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        fastattn.attention(query, query, query, causal=True)
        fastattn.attention(query, query, query, causal=True, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == ([] if backend == "torch" else [False, True, False])


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_reference_is_what_the_torch_path_computes(backend: str) -> None:
    inputs = [draw(1, 2, 5, 16) for _ in range(3)]
    torch.testing.assert_close(attend(*inputs), reference.attention(*inputs, causal=True, softcap=5.0)[0])


@pytest.mark.slow
def test_dropout_compiles_and_follows_the_generator() -> None:
    def attend_with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return fastattn.attention(query, key, value, dropout_p=0.5)

    # The inputs differ: gradients of one shared tensor would be added in 16 bits, in another order when compiled.
    inputs = [draw(1, 2, 5, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(attend_with_dropout, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    expected = outputs_and_gradients(attend_with_dropout, inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs), expected)
