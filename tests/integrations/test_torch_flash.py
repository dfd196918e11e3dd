"""Tests torch's own flash attention on our kernels, under the dispatch key of the tests' device.

Only on a GPU does ``F.scaled_dot_product_attention`` call these operators. On a CPU it calls others, so the tests call
the flash operators, and the Python function above them (``varlen_attn``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import MARKS
from fastattn.integrations import torch_flash
from flash_formulas import flash_attention, packed_flash_attention
from kernel_device import DEVICE
from torch_flash_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    LENGTHS_K,
    LENGTHS_Q,
    check_kernels,
    check_near,
    exact,
    leaves,
    packed_sizes,
    packed_tensors,
    random,
    swapped,
)

if not torch_flash.is_available():
    pytest.skip("needs torch 2.13 or later", allow_module_level=True)

from torch.nn.attention import varlen

pytestmark = [*MARKS, pytest.mark.usefixtures("flash_overrides")]

aten = torch.ops.aten


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


def test_the_backward_pass_uses_what_forward_chose() -> None:
    """Backward runs in another thread, where no `use_backend` is in force."""
    query = random(1, HEADS, 4, DIM).requires_grad_()
    for backend in ("cuda", "triton"):
        with fastattn.use_backend(backend):
            out = aten._scaled_dot_product_flash_attention(query, query, query)[0]
        with fastattn.record() as calls:
            thread = threading.Thread(target=torch.autograd.grad, args=(out.float().sum(), query))
            thread.start()
            thread.join()
        assert [call.backend for call in calls] == [backend]


def test_half_a_ring() -> None:
    """Context parallel does so: a block's gradients follow from output, lse, ``max_q`` and ``max_k`` of the whole."""
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
    assert len(calls) == (2 if varlen_attn is varlen.varlen_attn else 0)  # the graph contains our operators themselves
    wanted = model(q, k, v, *packed_sizes())
    assert torch.equal(out, wanted)
    check_near(grads, [grad.cpu() for grad in torch.autograd.grad(wanted.float().sum(), (q, k, v))])
