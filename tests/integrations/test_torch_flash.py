"""torch's own flash attention through the kernels, under the dispatch key of the device that the tests have.

Only a GPU shows what torch sends there: on a CPU ``F.scaled_dot_product_attention`` has operators of its own, so these
tests call the flash operators, and what is above them in Python (``varlen_attn``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import MARKS, checked
from fastattn.dispatch.thread_state import thread
from fastattn.integrations import torch_flash
from fastattn.integrations.torch_flash.switch import Overrides
from flash_formulas import flash_attention, offsets, packed_flash_attention
from kernel_device import DEVICE

if not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
    pytest.skip("needs torch 2.13 or later", allow_module_level=True)

from torch.nn.attention import varlen

pytestmark = MARKS

aten = torch.ops.aten
HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS_Q, LENGTHS_K = [3, 9, 5], [6, 4, 12]
NEAR = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    overrides = Overrides(DEVICE.upper())
    with fastattn.use_backend("cuda"), checked():
        yield
    overrides.remove()


def random(*shape: int, seed: int = 0) -> Tensor:
    """Values that float16 holds, so that both sides get the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def check_near(came: Any, wanted: Any) -> None:
    for ours, theirs in zip(came, wanted, strict=True):
        torch.testing.assert_close(ours.detach().double().cpu(), theirs.detach().double(), **NEAR)


def check_kernels(calls: list[Any]) -> None:
    """Of a forward and a backward pass: a GPU's runs in a thread of its own, where no backend is forced."""
    assert [call.op for call in calls] == ["attention", "attention backward"]
    assert calls[0].backend == "cuda" and calls[1].backend in (("cuda",) if DEVICE == "cpu" else ("cuda", "triton"))


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[B, H, S, D]`` as ``[B, S, H, D]``, and back."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def packed_sizes() -> tuple[Any, ...]:
    return offsets(LENGTHS_Q).to(DEVICE), offsets(LENGTHS_K).to(DEVICE), max(LENGTHS_Q), max(LENGTHS_K)


def packed_tensors() -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return random(total_q, HEADS, DIM), random(total_k, KV_HEADS, DIM, seed=1), random(total_k, KV_HEADS, DIM, seed=2)


# --- _scaled_dot_product_flash_attention ------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda heads, rows, dim, seed: random(2, heads, rows, dim, seed=seed),
    "BSHD": lambda heads, rows, dim, seed: random(2, rows, heads, dim, seed=seed).transpose(1, 2),
    "SBHD": lambda heads, rows, dim, seed: random(rows, 2, heads, dim, seed=seed).permute(1, 2, 0, 3),
    "slice": lambda heads, rows, dim, seed: random(2, rows, 3, heads, dim, seed=seed)[:, :, 1].transpose(1, 2),
}


@pytest.mark.parametrize("dim", [DIM, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.5}], ids=["plain", "causal"])
def test_sdpa(layout: str, options: dict[str, Any], dim: int) -> None:
    make = LAYOUTS[layout]
    query, key, value = (make(heads, 9, dim, seed).requires_grad_() for seed, heads in enumerate((4, 2, 2)))
    grad_out = make(4, 9, dim, 3)
    with fastattn.record() as calls:
        out, lse, *rest = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, **options)
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
    check_kernels(calls)
    inputs = exact(query, key, value)
    flash_options = {"causal": options.get("is_causal", False), "softmax_scale": options.get("scale")}
    wanted, wanted_lse = flash_attention(*swapped(*inputs), **flash_options)
    (wanted,) = swapped(wanted)
    check_near((out, lse), (wanted, wanted_lse))
    check_near(grads, torch.autograd.grad(wanted, inputs, grad_out.double().cpu()))
    for result, like in zip((out, *grads), (query, query, key, value), strict=True):
        assert result.stride() == torch.empty_like(like).stride()
    assert rest[:4] == [None, None, 9, 9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_out_is_as_torchs_shape_functions_say(layout: str) -> None:
    query = LAYOUTS[layout](HEADS, 6, DIM, 0)
    packed = packed_tensors()
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten._scaled_dot_product_flash_attention.default, (query, query, query)),
        (aten._flash_attention_forward.default, (*swapped(query, query, query), None, None, 6, 6, 0.0, True, False)),
        (aten._flash_attention_forward.default, (*packed, *packed_sizes(), 0.0, True, False)),
    ]
    from torch._subclasses.fake_tensor import FakeTensorMode

    for operator, arguments in calls:
        real = operator(*arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        for ours, theirs in zip(real, fake, strict=True):
            if isinstance(theirs, Tensor):
                assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            else:
                assert ours == theirs


def test_dropout_draws_what_rng_state_says() -> None:
    query = random(2, HEADS, 12, DIM)
    ours, theirs = leaves(query, query, query), leaves(query, query, query)
    torch.manual_seed(3)
    out, lse, _, _, _, _, rng_state, _, _ = aten._scaled_dot_product_flash_attention(*ours, 0.4, True)
    seed = rng_state.view(torch.int64)[0]
    wanted, wanted_lse = fastattn.attention(*theirs, causal=True, dropout_p=0.4, dropout_seed=seed, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    grads = torch.autograd.grad(out.float().square().sum(), ours)
    check_near(grads, [grad.cpu() for grad in torch.autograd.grad(wanted.float().square().sum(), theirs)])
    torch.manual_seed(3)
    assert torch.equal(aten._scaled_dot_product_flash_attention(query, query, query, 0.4, True)[0], out)


@pytest.mark.skipif(DEVICE != "cpu", reason="a wrong state stops the GPU for good")
def test_dropout_of_another_implementation_is_not_ours() -> None:
    query = random(1, HEADS, 4, DIM)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, query, query)
    state = torch.tensor([5, 4]).view(torch.uint64)
    with pytest.raises(RuntimeError, match="ran in another implementation"):
        aten._scaled_dot_product_flash_attention_backward(
            out, query, query, query, out, lse, None, None, 4, 4, 0.5, False, state, state
        )


def test_half_a_ring() -> None:
    """Context parallel: a block's gradients from the whole's output and lse, and the whole's ``max_q``, ``max_k``."""
    query, grad_out = random(1, HEADS, 8, DIM), random(1, HEADS, 8, DIM, seed=3)
    key, value = random(1, KV_HEADS, 16, DIM, seed=1), random(1, KV_HEADS, 16, DIM, seed=2)
    inputs = exact(query, key, value)
    wanted, lse = flash_attention(*swapped(*inputs))
    (wanted,) = swapped(wanted)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad_out.double().cpu())
    results = wanted.detach().half().to(DEVICE), lse.detach().float().to(DEVICE)[..., None].squeeze(-1)
    state = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
    grad_query = torch.zeros_like(inputs[0])
    for rows in (slice(0, 8), slice(8, 16)):
        blocks = key[:, :, rows], value[:, :, rows]
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, *blocks, *results, None, None, 16, 16, 0.0, False, state, state, scale=DIM**-0.5
        )
        grad_query += grads[0].double().cpu()
        check_near(grads[1:], [grad[:, :, rows] for grad in wanted_grads[1:]])
    check_near([grad_query], wanted_grads[:1])


# --- _flash_attention_forward -----------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "causal": (True, {}, {"causal": True}),
    "window": (False, {"window_size_left": 2, "window_size_right": 1, "scale": 0.3}, {"window_size": (2, 1)}),
    "causal window": (True, {"window_size_left": 2}, {"window_size": (2, 0)}),
    "ALiBi": (False, {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "causal ALiBi": (True, {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES, "causal": True}),
}


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone().to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_flash_forward_and_backward(kind: str, is_packed: bool) -> None:
    causal, options, flash_options = OPTIONS[kind]
    flash_options = {"softmax_scale": options.get("scale"), **flash_options}
    if is_packed:
        q, k, v = packed_tensors()
        sizes = packed_sizes()
    else:
        q, k, v = (random(2, rows, heads, DIM, seed=s) for s, (rows, heads) in enumerate([(5, 4), (9, 2), (9, 2)]))
        sizes = (None, None, 5, 9)
    grad_out = random(*q.shape, seed=4)
    inputs = exact(q, k, v)
    formula = packed_flash_attention if is_packed else flash_attention
    lengths = (LENGTHS_Q, LENGTHS_K) if is_packed else ()
    wanted, wanted_lse = formula(*inputs, *lengths, **flash_options)
    out, lse, rng_state, unused, _ = aten._flash_attention_forward(
        q, k, v, *sizes, 0.0, causal, False, **on_device(options)
    )
    check_near((out, lse), (wanted, wanted_lse.masked_fill(wanted_lse == math.inf, -math.inf)))
    if "alibi_slopes" not in options:
        grads = aten._flash_attention_backward(
            grad_out, q, k, v, out, lse, *sizes, 0.0, causal, rng_state, unused, **options
        )
        check_near(grads, torch.autograd.grad(wanted, inputs, grad_out.double().cpu()))


# --- varlen_attn ------------------------------------------------------------------------------------------------------

each_varlen_attn = pytest.mark.parametrize(
    "varlen_attn", [varlen.varlen_attn, torch_flash.varlen_attn], ids=["torch's", "fastattn's"]
)


@each_varlen_attn
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_varlen_attn(varlen_attn: Callable[..., Any], window: tuple[int, int]) -> None:
    q, k, v = leaves(*packed_tensors())
    grad_out = random(*q.shape, seed=4)
    inputs = exact(q, k, v)
    wanted, wanted_lse = packed_flash_attention(*inputs, LENGTHS_Q, LENGTHS_K, window_size=window)
    with fastattn.record() as calls:
        out, lse = varlen_attn(
            q, k, v, *packed_sizes(), window_size=window, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True)
        )
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
    check_kernels(calls)
    check_near((out, lse), (wanted, wanted_lse.masked_fill(wanted_lse == math.inf, -math.inf)))
    check_near(grads, torch.autograd.grad(wanted, inputs, grad_out.double().cpu()))


@each_varlen_attn
@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("is_paged", [False, True], ids=["packed", "paged"])
def test_varlen_attn_over_used_keys(varlen_attn: Callable[..., Any], is_paged: bool, num_splits: int | None) -> None:
    q, k, v = packed_tensors()
    used = [4, 4, 10]
    starts = [0, *torch.tensor(LENGTHS_K).cumsum(0).tolist()]
    parts = [[t[s : s + n] for s, n in zip(starts, used, strict=False)] for t in (k, v)]
    wanted, _ = packed_flash_attention(*exact(q, *map(torch.cat, parts)), LENGTHS_Q, used, causal=True)
    options: dict[str, Any] = {"seqused_k": torch.tensor(used, dtype=torch.int32, device=DEVICE)}
    sizes = packed_sizes()
    if is_paged:
        page, table = 8, torch.tensor([[3, 99], [0, 99], [2, 1]], dtype=torch.int32, device=DEVICE)
        pages = [torch.full((4, page, KV_HEADS, DIM), math.nan, dtype=k.dtype, device=DEVICE) for _ in range(2)]
        for pool, sequences in zip(pages, parts, strict=True):
            for row, rows in enumerate(sequences):
                for token, values in enumerate(rows):
                    pool[int(table[row, token // page]), token % page] = values
        (k, v), options["block_table"] = pages, table
        sizes = (sizes[0], None, *sizes[2:])
    out = varlen_attn(q, k, v, *sizes, window_size=(-1, 0), enable_gqa=True, num_splits=num_splits, **options)
    check_near([out], [wanted])


def test_varlen_attn_out_writes_in_place() -> None:
    q, k, v = packed_tensors()
    out = torch.full_like(q, math.nan)
    same = varlen.varlen_attn_out(out, q, k, v, *packed_sizes(), enable_gqa=True)
    assert same is out
    check_near([out], [packed_flash_attention(*exact(q, k, v), LENGTHS_Q, LENGTHS_K)[0]])


def test_aliases_signature_is_torchs() -> None:
    import inspect

    ours, theirs = (inspect.signature(f).parameters for f in (torch_flash.varlen_attn, varlen.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_aliases_gradients_know_used_keys() -> None:
    q, k, v = leaves(*packed_tensors())
    used = [4, 4, 10]
    parts = [torch.cat([rows[:n] for rows, n in zip(t.split(LENGTHS_K), used, strict=True)]) for t in (k, v)]
    inputs = exact(q, *parts)
    wanted, _ = packed_flash_attention(*inputs, LENGTHS_Q, used)
    seqused_k = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    out = torch_flash.varlen_attn(q, k, v, *packed_sizes(), enable_gqa=True, seqused_k=seqused_k)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    wanted_grads = torch.autograd.grad(wanted.sum(), inputs)
    check_near([out, grads[0]], [wanted, wanted_grads[0]])
    for grad, wanted_grad in zip(grads[1:], wanted_grads[1:], strict=True):
        rows = grad.split(LENGTHS_K)
        check_near([torch.cat([row[:n] for row, n in zip(rows, used, strict=True)])], [wanted_grad])
        assert all(row[n:].count_nonzero() == 0 for row, n in zip(rows, used, strict=True))


@each_varlen_attn
def test_compiled(varlen_attn: Callable[..., Any]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> Tensor:
        return varlen_attn(q, k, v, *sizes, window_size=(-1, 0), enable_gqa=True) * 2

    q, k, v = leaves(*packed_tensors())
    with fastattn.record() as calls:
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v, *packed_sizes())
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert len(calls) == (2 if varlen_attn is varlen.varlen_attn else 0)  # ours is in the graph, operators and all
    wanted = model(q, k, v, *packed_sizes())
    assert torch.equal(out, wanted)
    check_near(grads, [grad.cpu() for grad in torch.autograd.grad(wanted.float().sum(), (q, k, v))])


# --- what was there before --------------------------------------------------------------------------------------------


@pytest.fixture
def before() -> Iterator[list[str]]:
    """Another implementation under ours, which notes what it gets and calls what is installed as torch's function."""
    names: list[str] = []
    library = torch.library.Library("aten", "IMPL", DEVICE.upper())

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        names.append("forward")
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        lse = torch.full(query.shape[:3], -math.inf)
        state = torch.zeros(2, dtype=torch.int64).view(torch.uint64)
        return out, lse, None, None, query.shape[2], key.shape[2], state, state[0], query.new_empty(0)

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        names.append(f"backward, lse {args[5].flatten()[0]}")
        return args[1] * 0, args[2] * 0, args[3] * 0

    library.impl("_scaled_dot_product_flash_attention", forward, allow_override=True)
    library.impl("_scaled_dot_product_flash_attention_backward", backward, allow_override=True)
    yield names
    library._destroy()


@pytest.mark.skipif(DEVICE != "cpu", reason="would replace what a GPU has")
def test_what_no_kernel_takes_goes_to_what_was_there(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    overrides = Overrides("CPU")
    try:
        query = torch.randn(1, 2, 3, 8, requires_grad=True)  # float32
        wide = random(1, 2, 3, 264).requires_grad_()
        for tensor, backend in ((query, None), (wide, None), (random(1, 2, 3, DIM).requires_grad_(), "torch")):
            monkeypatch.setattr(thread, "forced", backend)
            out, *_ = aten._scaled_dot_product_flash_attention(tensor, tensor, tensor)
            torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(tensor, tensor, tensor))
            monkeypatch.setattr(thread, "forced", None)
            out.sum().backward()
        assert before == ["forward", "backward, lse inf"] * 3
        monkeypatch.setattr(thread, "forced", None)
        fastattn.install()  # both switches at once: the one below calls the one above
        try:
            with fastattn.record() as calls:
                aten._scaled_dot_product_flash_attention(query, query, query)
                monkeypatch.setattr(thread, "forced", "cuda")
                half = random(1, 2, 3, DIM)
                aten._scaled_dot_product_flash_attention(half, half, half)
        finally:
            fastattn.uninstall()
        assert before[6:] == ["forward"]
        assert [call.backend for call in calls] == ["torch", "cuda"]
    finally:
        overrides.remove()
    half = random(1, 2, 3, DIM)
    aten._scaled_dot_product_flash_attention(half, half, half)
    assert before[7:] == ["forward"]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has kernels of torch's")
def test_where_nothing_was_there_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "forced", None)
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(fastattn.InputError, match=r"aten::_scaled_dot_product_flash_attention: no kernel.*on cpu"):
        aten._scaled_dot_product_flash_attention(query, query, query)


def test_a_detour_is_announced(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "forced", None)
    monkeypatch.setenv("FASTATTN_FALLBACK", "error")
    overrides = Overrides(DEVICE.upper())
    try:
        with pytest.raises(fastattn.InputError, match=r"would run in PyTorch.*float32"):
            aten._scaled_dot_product_flash_attention(*(torch.zeros(1, 1, 1, 8, device=DEVICE),) * 3)
    finally:
        overrides.remove()
    assert before == []


def test_explain_names_the_kernel_of_varlen_attn() -> None:
    explanation = fastattn.explain(torch_flash.varlen_attn, *packed_tensors(), *packed_sizes(), enable_gqa=True)
    assert explanation.backend == "cuda"


def test_torchs_choice_of_backends_does_not_stop_us() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = random(1, 2, 3, DIM)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
        aten._scaled_dot_product_flash_attention(query, query, query)
    assert [call.backend for call in calls] == ["cuda"]


@pytest.mark.skipif(DEVICE == "cpu", reason="torch chooses its flash operators on a GPU alone")
def test_torchs_function_reaches_the_kernels() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch_sdpa = torch._C._nn.scaled_dot_product_attention
    inputs = leaves(*(random(2, HEADS, 64, 64, seed=seed) for seed in range(3)))
    torch_flash.enable()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
            out = torch_sdpa(*inputs, is_causal=True)
            grads = torch.autograd.grad(out.float().sum(), inputs)
        check_kernels(calls)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), fastattn.record() as calls:
            with fastattn.use_backend("torch"):
                wanted = torch_sdpa(*inputs, is_causal=True)
                dropped = torch_sdpa(*inputs, dropout_p=0.5)
            wanted_grads = torch.autograd.grad(wanted.float().sum(), inputs)
            torch.autograd.grad(dropped.float().sum(), inputs)
        assert calls == []
    finally:
        torch_flash.disable()
    torch.testing.assert_close((out, *grads), (wanted, *wanted_grads), **NEAR)


# --- the switch -------------------------------------------------------------------------------------------------------


class _Other:
    active = 0

    def __init__(self) -> None:
        _Other.active += 1

    def remove(self) -> None:
        _Other.active -= 1


def test_disable_restores_what_was_there() -> None:
    from torch.nn.attention import _registry as registry

    name = "aten::_scaled_dot_product_flash_attention"
    try:
        registry.register_flash_attention_impl("other", register_fn=_Other)
        registry.activate_flash_attention_impl("other")
        dumped = torch._C._dispatch_dump(name)
        torch_flash.enable()
        torch_flash.enable()
        assert registry.current_flash_attention_impl() == "fastattn" and _Other.active == 0
        assert torch._C._dispatch_dump(name) != dumped
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other" and _Other.active == 1
        assert torch._C._dispatch_dump(name) == dumped
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other"

        torch_flash.enable()
        registry.activate_flash_attention_impl("other")  # somebody else's decision
        torch_flash.disable()
        assert registry.current_flash_attention_impl() == "other" and _Other.active == 1
        assert torch._C._dispatch_dump(name) == dumped
    finally:
        registry.restore_flash_attention_impl(_raise_warn=False)
        registry._FLASH_ATTENTION_IMPLS.pop("other", None)


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.13 or later, got 2\.12\.1"):
        torch_flash.enable()


# --- refused ----------------------------------------------------------------------------------------------------------


def dense() -> tuple[Any, ...]:
    return (*(random(1, 3, HEADS, DIM) for _ in range(3)), None, None, 3, 3, 0.0, False)


def packed(**changes: Any) -> tuple[Any, ...]:
    return *packed_tensors(), *packed_sizes(), 0.0, False


def used() -> Tensor:
    return torch.tensor([4, 4, 10], dtype=torch.int32, device=DEVICE)


REFUSED: dict[str, Callable[[], Any]] = {
    r"return_debug_mask: expected False": lambda: aten._flash_attention_forward(*dense(), True),
    r"seqused_k: expected None beside tensors \[B": lambda: aten._flash_attention_forward(
        *dense(), False, seqused_k=used()
    ),
    r"seqused_k: expected None beside tensors that require": lambda: aten._flash_attention_forward(
        packed()[0].requires_grad_(), *packed()[1:], False, seqused_k=used()
    ),
    r"alibi_slopes: expected None beside tensors that require": lambda: aten._flash_attention_forward(
        packed()[0].requires_grad_(), *packed()[1:], False, alibi_slopes=SLOPES.to(DEVICE)
    ),
    r"cum_seq_k: expected the offsets": lambda: aten._flash_attention_forward(
        *packed()[:4], None, *packed()[5:], False
    ),
    r"dropout_p: expected 0": lambda: aten._flash_attention_forward_no_dropout_inplace(
        packed()[0], *packed()[:7], 0.5, False, False
    ),
    r"out: expected the query's shape": lambda: aten._flash_attention_forward_no_dropout_inplace(
        packed()[1], *packed(), False
    ),
    r"key: expected the query's 4 heads": lambda: torch_flash.varlen_attn(*packed()[:7]),
    r"query: expected .*\[total_q, Hq, D\]": lambda: torch_flash.varlen_attn(packed()[0][0], *packed()[1:7]),
    r"key: expected .*\[num_pages, page_size, Hkv, D\]": lambda: torch_flash.varlen_attn(
        *packed()[:7], seqused_k=used(), block_table=used()[:, None]
    ),
    r"seqused_k: expected .*int32": lambda: torch_flash.varlen_attn(*packed()[:7], seqused_k=used().long()),
    r"seqused_k: expected .*\[B\]": lambda: torch_flash.varlen_attn(*packed()[:7], seqused_k=used()[:2]),
    r"the dtype is torch.float32": lambda: aten._scaled_dot_product_flash_attention(*(torch.zeros(1, 1, 1, 8),) * 3),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.skipif(DEVICE != "cpu", reason="what torch itself refuses, it words itself")
def test_what_is_refused_is_named(words: str) -> None:
    with pytest.raises(fastattn.InputError, match=words):
        REFUSED[words]()
