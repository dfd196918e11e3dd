"""Draws attention problems, runs the kernels on them, and compares the results with the oracle."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.triton_kernels import attention_backward as backward_module
from fastattn.triton_kernels import attention_forward as forward_module
from fastattn.triton_kernels.tiles import AttentionTile
from kernel_device import DEVICE, ON_EMULATOR
from oracle import check_against_oracle

if ON_EMULATOR:
    from emulator import options as launch_options

DTYPES = (torch.float16, torch.bfloat16)
SMALL_TILE = AttentionTile(16, 32, num_warps=4, num_stages=1)  # so that short sequences have many tiles
SEED = 0x123456789ABCDEF
RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_slopes")


@dataclass(frozen=True)
class Case:
    """One problem, which determines its tensors. ``lengths`` (of queries, of keys) make it a packed one."""

    shape: tuple[int, int, int, int, int] = (1, 2, 1, 33, 47)  # B, Hq, group size, Sq, Sk
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float16
    window: tuple[int, int] = (-1, -1)
    first_row: int | None = None  # None: the last row is at the last key
    first_key: int = 0
    first_head: int = 0
    softcap: float = 0.0
    alibi: str = ""  # "head" or "batch"
    mask: str = ""  # "bool", "float", "inf" (masked entries are -inf), "min" (they are finfo.min), "all min"
    mask_shape: tuple[int, int, int, int] = (1, 1, 1, 1)  # 1 = use the full size, 0 = broadcast
    sinks: bool = False
    ranges: int = 0  # number of ranges of visible keys of each query
    ranges_shape: tuple[int, int] = (1, 1)  # [batch, heads], 1 and 0 as in mask_shape
    dropout: float = 0.0
    scale: float | None = None
    layout: str = "bhsd"  # "bshd", "sliced", "misaligned"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    magnitude: float = 1.0
    grad_lse: bool = False
    small_tile: bool = True
    seed: int = 0

    @property
    def place(self) -> tuple[int | None, int, int]:
        return self.first_row, self.first_key, self.first_head

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return ",".join(f"{name}={value}".replace(" ", "").replace("torch.", "") for name, value in changed.items())


@dataclass
class Problem:
    """The tensors of a case. ``bias`` is 4-D; packed tensors are ``[total, H, D]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None
    key_ranges: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlens: tuple[int, int] = (0, 0)
    options: dict[str, Any] = field(default_factory=dict)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns the same values in another memory layout."""
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":  # last dim strided: must be copied
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]
    if layout == "misaligned":  # one element off: must be copied
        buffer = tensor.new_full((tensor.numel() + 1,), torch.nan)
        buffer[1:] = tensor.flatten()
        return buffer[1:].view(tensor.shape)
    return tensor


def make_bias(case: Case, generator: torch.Generator) -> Tensor | None:
    if not case.mask:
        return None
    batch, heads, _, rows, columns = case.shape
    full = (batch, heads, rows, columns)
    shape = [size if use else 1 for size, use in zip(full, case.mask_shape, strict=True)]
    attend = torch.rand(shape, generator=generator) < 0.6
    if case.mask == "bool":
        return attend
    bias = torch.randn(shape, generator=generator).to(case.dtype)
    if case.mask == "inf":
        bias = bias.masked_fill(~attend, -torch.inf)
    if case.mask == "min":
        bias = bias.masked_fill(~attend, torch.finfo(case.dtype).min)
    if case.mask == "all min":
        bias = torch.full(shape, torch.finfo(torch.float32).min)
    return bias


def make_ranges(case: Case, generator: torch.Generator) -> Tensor | None:
    """Draws ranges of keys. Neighbouring queries often have the same ranges, so that some tiles are full and some are
    empty; a query may see no key, or all."""
    if not case.ranges:
        return None
    batch, heads, _, rows, columns = case.shape
    outer = [size if use else 1 for size, use in zip((batch, heads), case.ranges_shape, strict=True)]
    if case.lengths is not None:  # a query sees keys of its own sequence only
        outer, rows = outer[1:], sum(case.lengths[0])
        keys = torch.tensor(case.lengths[1]).repeat_interleave(torch.tensor(case.lengths[0]))
    else:
        keys = torch.full((rows,), columns)
    cuts = torch.rand(*outer, rows, 2 * case.ranges, generator=generator).sort(-1).values
    is_like_before = torch.rand(rows, generator=generator) < 0.9
    row = torch.where(is_like_before, 0, torch.arange(rows)).cummax(0).values if rows else torch.arange(0)
    kind = torch.randint(8, (rows,), generator=generator)[row][:, None]
    places = (cuts[..., row, :] * (keys[:, None] + 1)).floor().clamp(max=keys[:, None])
    places = torch.where(kind == 0, 0, places)
    places[..., -1:] = torch.where(kind == 1, keys[:, None], places[..., -1:])
    places[..., :-1] = torch.where(kind == 1, 0, places[..., :-1])
    return places.to(torch.int32).unflatten(-1, (case.ranges, 2))


def make_problem(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    batch, heads, group, rows, columns = case.shape
    head_dim, value_dim = case.head_dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if case.lengths is not None:
        batch, rows, columns = 1, sum(case.lengths[0]), sum(case.lengths[1])
    query, key = normal(batch, heads, rows, head_dim), normal(batch, heads // group, columns, head_dim)
    value, grad_out = normal(batch, heads // group, columns, value_dim), normal(batch, heads, rows, value_dim)
    grad_lse = normal(batch, heads, rows) if case.grad_lse else None
    tensors = [(t * m).to(case.dtype) for t, m in ((query, case.magnitude), (key, 1.0), (value, 1.0), (grad_out, 1.0))]
    query, key, value, grad_out = (laid_out(t, case.layout).to(DEVICE) for t in tensors)
    slopes = None
    if case.alibi:
        num_sequences = len(case.lengths[0]) if case.lengths else batch
        slopes = torch.rand(num_sequences if case.alibi == "batch" else 1, heads, generator=generator).to(DEVICE)
    bias = make_bias(case, generator)
    ranges = make_ranges(case, generator)
    problem = Problem(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else bias.to(DEVICE),
        alibi_slopes=slopes,
        sinks=normal(heads).to(DEVICE) if case.sinks else None,
        grad_out=grad_out,
        grad_lse=None if grad_lse is None else grad_lse.to(DEVICE),
        key_ranges=None if ranges is None else ranges.to(DEVICE),
        max_seqlens=(rows, columns),
    )
    if case.lengths is not None:
        for name in ("query", "key", "value", "grad_out"):
            setattr(problem, name, getattr(problem, name)[0].transpose(0, 1))
        if problem.grad_lse is not None:
            problem.grad_lse = problem.grad_lse[0]
        problem.cu_seqlens_q, problem.cu_seqlens_k = offsets(case.lengths[0]), offsets(case.lengths[1])
        problem.max_seqlens = (max(case.lengths[0], default=0), max(case.lengths[1], default=0))
    return problem


def options_of(case: Case) -> tuple[Any, ...]:
    scale = case.scale if case.scale is not None else case.head_dims[0] ** -0.5
    return scale, *case.window, *case.place, case.softcap, case.dropout


def placed(place: Sequence[int | None]) -> dict[str, Any]:
    """Returns the keyword arguments of ``reference.attention`` for a place."""
    return dict(zip(("first_row", "first_key", "first_head"), place, strict=True))


def forward_arguments(case: Case, problem: Problem) -> tuple[Any, ...]:
    """Returns the arguments of the op ``attention_forward``, in the order of its schema."""
    p = problem
    seed = torch.tensor([SEED], device=DEVICE)
    score = (p.bias, p.alibi_slopes, p.sinks, seed, p.cu_seqlens_q, p.cu_seqlens_k, *p.max_seqlens, *options_of(case))
    return p.query, p.key, p.value, *score


def backward_arguments(
    case: Case, problem: Problem, out: Tensor, lse: Tensor, deterministic: bool = True
) -> tuple[Any, ...]:
    """Returns the arguments of the op ``attention_backward``; asks for the gradients of a float bias and slopes."""
    p = problem
    _, _, _, *shared = forward_arguments(case, problem)
    bias_grad = p.bias is not None and p.bias.is_floating_point()
    return (
        p.grad_out,
        p.grad_lse,
        p.query,
        p.key,
        p.value,
        out,
        lse,
        *shared,
        deterministic,
        bias_grad,
        p.alibi_slopes is not None,
    )


def in_order(deterministic: bool | None) -> contextlib.AbstractContextManager[None]:
    """Makes the emulator check that deterministic kernels add floating numbers in one fixed order."""
    if not (deterministic and ON_EMULATOR):
        return contextlib.nullcontext()
    return launch_options.launching(ordered_sums=True)


def run_ops(ops: Any, case: Case, problem: Problem, deterministic: bool = True) -> dict[str, Tensor]:
    """Runs forward and backward of ``ops``: ``torch.ops.fastattn``, or a module with functions of the same names."""
    ranges = {} if problem.key_ranges is None else {"key_ranges": problem.key_ranges}
    out, lse, _ = ops.attention_forward(*forward_arguments(case, problem), **ranges)
    with in_order(deterministic):
        gradients = ops.attention_backward(*backward_arguments(case, problem, out, lse, deterministic), **ranges)
    return dict(zip(RESULTS, (out, lse, *gradients), strict=True))


def use_small_tiles(monkeypatch: Any) -> None:
    """Makes the Triton kernels use `SMALL_TILE`."""
    monkeypatch.setattr(forward_module, "attention_forward_tile", lambda *_, **__: SMALL_TILE)
    monkeypatch.setattr(backward_module, "attention_backward_tile", lambda *_, **__: SMALL_TILE)


def run_kernels(case: Case, problem: Problem, monkeypatch: Any) -> dict[str, Tensor]:
    """Runs forward and backward of the Triton kernels."""
    if case.small_tile:
        use_small_tiles(monkeypatch)
    return run_ops(torch.ops.fastattn_triton, case, problem)


def run_public(case: Case, problem: Problem, backend: str, deterministic: bool | None = None) -> dict[str, Tensor]:
    """Runs forward and backward through the public functions, on one backend.

    Only the drop-in is causal from the top left; it takes nothing but causal masks, a bias and a scale.
    """
    p = problem
    scale, left, right, first_row, first_key, first_head, softcap, dropout = options_of(case)
    leaves = {"query": p.query, "key": p.key, "value": p.value, "bias": p.bias, "sinks": p.sinks}
    leaves |= {"slopes": p.alibi_slopes}
    leaves = {
        name: None if t is None else t.detach().requires_grad_(t.is_floating_point()) for name, t in leaves.items()
    }
    query, key, value, bias, sinks, slopes = leaves.values()
    options: dict[str, Any] = {
        "window": (left, right),
        "softcap": softcap,
        "alibi_slopes": slopes[0] if case.alibi == "head" and slopes is not None else slopes,
        "sinks": sinks,
        "dropout_p": dropout,
        "dropout_seed": SEED,
        "scale": scale,
        "return_lse": True,
        "deterministic": deterministic,
    }
    lse = None
    with fastattn.use_backend(backend):
        if first_row is not None:
            assert (first_row, first_key, first_head) == (0, 0, 0)
            assert left == -1 and right in (-1, 0) and not (softcap or dropout or case.sinks or case.alibi)
            out = fastattn.scaled_dot_product_attention(
                query, key, value, bias, is_causal=right == 0, scale=scale, enable_gqa=True
            )
        elif case.lengths is None:
            out, lse = fastattn.attention(query, key, value, bias=bias, key_ranges=p.key_ranges, **options)
        else:
            out, lse = fastattn.attention_varlen(
                query, key, value, p.cu_seqlens_q, p.cu_seqlens_k, *p.max_seqlens, key_ranges=p.key_ranges, **options
            )
    outputs, grads = [out], [p.grad_out]
    if p.grad_lse is not None and lse is not None:
        outputs.append(lse)
        grads.append(p.grad_lse)
    wanted = {name: t for name, t in leaves.items() if t is not None and t.requires_grad}
    with in_order(deterministic):
        found = torch.autograd.grad(outputs, list(wanted.values()), grads)
    result = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    return result | {f"grad_{name}": gradient for name, gradient in zip(wanted, found, strict=True)}


def run_reference(case: Case, problem: Problem, dtype: torch.dtype, compute_dtype: torch.dtype) -> dict[str, Tensor]:
    """Runs forward and backward of `fastattn.reference` with autograd, on inputs converted to ``dtype``."""

    def leaf(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(dtype).requires_grad_()

    p = problem
    query, key, value = (t.detach().to(dtype).requires_grad_() for t in (p.query, p.key, p.value))
    bias, slopes, sinks = leaf(p.bias), leaf(p.alibi_slopes), leaf(p.sinks)
    scale, left, right, *place, softcap, dropout = options_of(case)
    common: dict[str, Any] = {
        "window": (left, right),
        "softcap": softcap,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "dropout_p": dropout,
        "dropout_seed": SEED,
        "scale": scale,
        "key_ranges": p.key_ranges,
        "compute_dtype": compute_dtype,
    }
    if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
        out, lse = reference.attention_varlen(
            query, key, value, p.cu_seqlens_q, p.cu_seqlens_k, *p.max_seqlens, **placed(place), **common
        )
    else:
        out, lse = reference.attention(query, key, value, bias=bias, **placed(place), **common)
    outputs, grads = [out], [p.grad_out.to(out.dtype)]
    if p.grad_lse is not None:
        outputs.append(lse)
        grads.append(p.grad_lse.to(lse.dtype))
    leaves = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks, "slopes": slopes}
    wanted = {name: t for name, t in leaves.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(outputs, list(wanted.values()), grads, allow_unused=True)
    result = {"out": out.detach(), "lse": lse.detach()}
    for (name, tensor), gradient in zip(wanted.items(), found, strict=True):
        result[f"grad_{name}"] = torch.zeros_like(tensor) if gradient is None else gradient
    return result


def check(
    case: Case, monkeypatch: Any, problem: Problem | None = None, measure: Case | None = None
) -> dict[str, Tensor]:
    """Compares every result of the Triton kernels with the oracle, and returns the kernels' results.

    ``measure``: another case for PyTorch's composite computation, where it cannot compute this one in its dtype.
    """
    problem = problem or make_problem(case)
    actual = run_kernels(case, problem, monkeypatch)
    compare(case, problem, actual, measure)
    return actual


def compare(
    case: Case,
    problem: Problem,
    actual: dict[str, Tensor],
    measure: Case | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Compares the results with the oracle: all of them, or those that ``names`` lists."""
    oracle = run_reference(case, problem, torch.float64, torch.float64)
    composite = run_reference(measure or case, problem, case.dtype, case.dtype)
    for name in names or oracle:
        if name == "grad_slopes" and slopes_error(case, problem, actual, oracle[name]) <= 5:
            continue
        check_against_oracle(f"{case}: {name}", actual[name], oracle[name], composite[name])
        if name == "lse":
            check_closely(f"{case}: {name}", actual[name], oracle[name])


def slopes_error(case: Case, problem: Problem, actual: dict[str, Tensor], oracle: Tensor) -> float:
    """Returns the slopes' gradient's error, in standard deviations of what rounding O adds to it through delta.

    The gradient is one number per head: a sum, over all rows, of terms with both signs. The composite's error is
    therefore down to luck. A row has ``dslope = sum_j P_ij (delta_i - dP_ij) distance_ij``, and ``sum_j P_ij
    distance_ij`` is the derivative of its lse.
    """
    p = problem
    assert p.alibi_slopes is not None
    scale, left, right, *place, softcap, _ = options_of(case)
    query, key, value = p.query.double(), p.key.double(), p.value.double()
    common: dict[str, Any] = {"window": (left, right), "softcap": softcap, "sinks": p.sinks, "scale": scale}
    common["key_ranges"] = p.key_ranges

    def lse_of(slopes: Tensor) -> Tensor:
        common["alibi_slopes"], common["compute_dtype"] = slopes, torch.float64
        if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
            packed = (query, key, value, p.cu_seqlens_q, p.cu_seqlens_k, *p.max_seqlens)
            return reference.attention_varlen(*packed, **placed(place), **common)[1]
        return reference.attention(query, key, value, bias=p.bias, **placed(place), **common)[1]

    slopes = p.alibi_slopes.double()
    _, distances = torch.func.jvp(lse_of, (slopes,), (torch.ones_like(slopes),))  # shaped like lse
    products = (p.grad_out.double() * actual["out"].double()).square().sum(-1)
    if case.lengths is None:
        variance = (distances.nan_to_num(0.0).square() * products).sum(2).sum_to_size(slopes.shape)
    else:
        rows = distances.nan_to_num(0.0).square() * products.transpose(0, 1)
        of_sequences = torch.stack([part.sum(1) for part in rows.split(list(case.lengths[0]), 1)])
        variance = of_sequences.sum_to_size(slopes.shape)
    deviation = torch.finfo(case.dtype).eps / math.sqrt(12) * variance.sqrt()
    rounded = 1e-6 * (oracle.abs() + max(case.shape[3:]) * (0.0 if p.grad_lse is None else 1.0))
    error = (actual["grad_slopes"].double() - oracle).abs()
    return float(((error - rounded) / deviation.clamp(min=1e-6)).max()) if error.numel() else 0.0


def check_closely(name: str, actual: Tensor, oracle: Tensor) -> None:
    """Asserts a tight bound for lse, which is computed in fp32 throughout.

    The composite gives no bound here: natural exponentials round differently from the kernels' base-2 exponentials.
    """
    assert torch.equal(actual.isinf().cpu(), oracle.isinf().cpu()), f"{name}: infinities differ"
    expected = oracle.masked_fill(oracle.isinf(), 0.0)
    largest = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = (actual.double().masked_fill(oracle.isinf(), 0.0) - expected).abs()
    assert bool((error <= 1e-5 * largest).all()), f"{name}: off by {error.max().item():.3e} of {largest:.3e}"
