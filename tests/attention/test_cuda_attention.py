"""Tests the CUDA C++ attention kernels against the oracle, from the public functions down.

They run on a GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import instances
import kernel_symbols
from cuda_kernels import DTYPES, EMULATED, FAMILY, MARKS, each_dtype, only_emulated
from fastattn import reference
from fastattn.dispatch.device import kernel_facts
from kernel_device import DEVICE
from oracle import check_against_oracle
from turns import in_turn

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device, launches, options

pytestmark = MARKS

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # test_cuda_attention_options.py has the same for the kernel with options
OP = "attention_forward"
SEED = 5

each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@contextlib.contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Turns the emulator's checks on; at least one forward kernel must be launched. ``changes``: other launch
    options."""
    if not EMULATED:
        yield
        return
    checks = options.launching(**{"tracked": True, "uninitialised": True, "seed": SEED, **changes})
    with cuda_runtime.raising_faults(), checks, launches.recorded() as found:
        yield
    assert [launched for launched in found if "attention_forward_sm" in launched.report.kernel]


def arguments(query: Tensor, key: Tensor, value: Tensor, **changes: Any) -> dict[str, Any]:
    """Returns the arguments of the raw op."""
    usual = {
        **dict.fromkeys(("bias", "alibi_slopes", "sinks", "dropout_seed", "cu_seqlens_q", "cu_seqlens_k")),
        "max_seqlen_q": query.shape[2],
        "max_seqlen_k": key.shape[2],
        "scale": query.shape[-1] ** -0.5,
        "window_left": -1,
        "window_right": -1,
        "first_row": None,
        "first_key": 0,
        "first_head": 0,
        "softcap": 0.0,
        "dropout_p": 0.0,
    }
    return {"query": query, "key": key, "value": value, **usual, **changes}


def run(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, *, scale: float | None = None, first_row: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns output and lse. Only the raw op gives both for masks that are aligned to the top left."""
    if first_row is not None:
        changes = {} if scale is None else {"scale": scale}
        out, lse, _ = getattr(torch.ops.fastattn, OP)(
            **arguments(query, key, value, window_right=0 if causal else -1, first_row=0, **changes)
        )
        return out, lse
    with fastattn.use_backend("cuda"):
        return fastattn.attention(query, key, value, causal=causal, scale=scale, return_lse=True)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    launching: dict[str, Any] | None = None,
    **meaning: Any,
) -> None:
    with running(**(launching or {})):
        out, lse = run(query, key, value, causal, **meaning)
    exact, exact_lse = reference.attention(*(t.double() for t in (query, key, value)), causal=causal, **meaning)
    composite, composite_lse = reference.attention(
        query, key, value, causal=causal, compute_dtype=query.dtype, **meaning
    )
    check_against_oracle("out", out, exact, composite)
    check_against_oracle("lse", lse, exact_lse, composite_lse)


def inputs(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    heads: tuple[int, int] = (2, 1),
    batch: int = 1,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = ((heads[0], rows, head_dim), (heads[1], keys, head_dim), (heads[1], keys, value_dim or head_dim))
    query, key, value = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    return query.to(DEVICE, dtype), key.to(DEVICE, dtype), value.to(DEVICE, dtype)


# --- Shapes -----------------------------------------------------------------------------------------------------------

# Lengths: one, primes, a tile of queries or keys and one more or less, more queries than keys, no key.
SHAPES = [(1, 1), (77, 131), (257, 67), (127, 64), (128, 192), (129, 65), (33, 63), (33, 0)]


@pytest.mark.parametrize("head_dim", [64, 128])
@each_dtype
@each_mask
@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_shapes(head_dim: int, dtype: torch.dtype, causal: bool, rows: int, keys: int) -> None:
    check(*inputs(head_dim, dtype, rows, keys), causal, {"seed": rows})


@pytest.mark.parametrize("head_dim", [32, 96, 192, 256])
@each_mask
@pytest.mark.parametrize(
    ("rows", "keys", "dtype"),
    [(1, 1, DTYPES[0]), (77, 131, DTYPES[1]), (129, 65, DTYPES[0]), (130, 32, DTYPES[1])],
    ids=str,
)
def test_shapes_at_other_head_dims(head_dim: int, dtype: torch.dtype, causal: bool, rows: int, keys: int) -> None:
    check(*inputs(head_dim, dtype, rows, keys), causal, {"seed": rows})


@only_emulated
@each_dtype
@each_mask
@pytest.mark.parametrize(("rows", "keys"), [(20, 700), *SHAPES])  # the first is split among CTAs
def test_little_shared_memory(rows: int, keys: int, causal: bool, dtype: torch.dtype) -> None:
    """At 128 dims, tiles have fewer keys where an SM has 100 KB of shared memory, so that two CTAs fit."""
    query, key, value = inputs(128, dtype, rows, keys)
    with device.emulated(80, shared_memory_bytes=99 << 10):
        check(query, key, value, causal)
        explained = fastattn.explain(fastattn.attention, query, key, value, causal=causal)
        assert explained.kernel == f"attention_forward_sm80<128, {str(dtype).removeprefix('torch.')}, few keys>"
        with launches.recorded() as found:
            out, _ = run(query, key, value, causal)
            if keys > rows > 1 and causal:  # only the last row sees the last key
                key[:, :, -1], value[:, :, -1] = torch.nan, torch.inf
                spoiled, _ = run(query, key, value, causal)
                assert torch.equal(spoiled[:, :, :-1], out[:, :, :-1])
    assert found
    for launched in found:
        assert kernel_symbols.name_of(launched.report.kernel) == explained.kernel
        assert 2 * (launched.report.shared_bytes + (1 << 10)) <= 100 << 10


@each_mask
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(8, 8), (24, 32), (64, 16), (80, 80), (72, 96), (104, 128), (128, 192), (160, 8), (248, 200)],
)
def test_head_dims_between(head_dim: int, value_dim: int, causal: bool) -> None:
    """The kernel pads them itself: the memory after each row holds NaN."""
    query, key, value = inputs(head_dim, DTYPES[head_dim // 8 % 2], 60, 100, value_dim=value_dim)

    def with_nan_beside(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]

    check(with_nan_beside(query), with_nan_beside(key), with_nan_beside(value), causal)


@each_mask
@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (1, 0, 5, 7), (1, 2, 0, 7)])
def test_nothing_to_do(shape: tuple[int, int, int, int], causal: bool) -> None:
    batch, heads, rows, keys = shape
    query, key = torch.ones(batch, heads, rows, 64).to(DEVICE, torch.float16), torch.ones(batch, heads, keys, 64)
    key = key.to(query)
    with fastattn.use_backend("cuda"):
        out, lse = fastattn.attention(query, key, key, causal=causal, return_lse=True)
    assert out.shape == query.shape and lse.shape == query.shape[:3]


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("rows_and_keys", [(150, 70), (70, 150)])
def test_top_left(head_dim: int, rows_and_keys: tuple[int, int]) -> None:
    check(*inputs(head_dim, torch.bfloat16, *rows_and_keys), True, first_row=0)


def test_the_drop_in_is_top_left() -> None:
    query, key, value = inputs(64, torch.float16, 150, 70)
    with running(), fastattn.use_backend("cuda"):
        out = fastattn.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(out, run(query, key, value, True, first_row=0)[0])


def test_grouped_heads_and_strides() -> None:
    """Heads are adjacent in memory, as a projection writes them, in a buffer that is NaN elsewhere."""
    query, key, value = inputs(64, torch.float16, 90, 110, heads=(6, 2), batch=2)

    def interleaved(tensor: Tensor) -> Tensor:
        batch, heads, rows, head_dim = tensor.shape
        buffer = torch.full((batch, rows, heads + 1, head_dim), torch.nan, dtype=tensor.dtype, device=tensor.device)
        buffer[:, :, :heads] = tensor.transpose(1, 2)
        return buffer[:, :, :heads].transpose(1, 2)

    check(interleaved(query), interleaved(key), interleaved(value), True)
    assert run(interleaved(query), key, value, True)[0].transpose(1, 2).is_contiguous()


def test_the_stride_of_a_single_row_is_not_used() -> None:
    """Kernels copy whole tiles in 16 bytes, and rows that do not exist must have aligned addresses, too."""
    one_row = [t.reshape(*t.shape[:2], 64, 1).transpose(-1, -2) for t in inputs(64, torch.float16, 1, 1)]
    assert all(t.stride(-2) == 1 for t in one_row)
    check(*one_row, False)


def test_what_is_not_aligned_is_copied() -> None:
    """A query that is off by one element, and keys whose last dim has gaps; NaN in between."""
    query, key, value = inputs(64, torch.bfloat16, 40, 50)
    shifted = query.new_full((query.numel() + 1,), torch.nan)
    shifted[1:] = query.flatten()
    gaps = torch.stack([key, torch.full_like(key, torch.nan)], -1).flatten(-2)[..., ::2]
    check(shifted[1:].view(query.shape), gaps, value, False)


# --- Values -----------------------------------------------------------------------------------------------------------


@each_head_dim
@each_dtype
def test_masked_keys_have_no_influence(head_dim: int, dtype: torch.dtype) -> None:
    """Keys and values hold NaN or infinity where no query sees them, or only the later queries."""
    query, key, value = inputs(head_dim, dtype, 100, 100)
    key[:, :, 60], value[:, :, 61], value[:, :, 62] = torch.nan, torch.nan, torch.inf
    check(query, key, value, True, first_row=0)
    check(query[:, :, :50], key, value, True, first_row=0)


@pytest.mark.parametrize("head_dim", [64, 96])  # with Q in registers, and without
@pytest.mark.parametrize("scale", [0.0, -0.3, 4.0])
@each_dtype
def test_scales(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    check(*inputs(head_dim, dtype, 70, 90), False, scale=scale)


@pytest.mark.parametrize("head_dim", [64, 128])
@each_dtype
@each_mask
def test_one_dominant_key(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    query, key, value = inputs(head_dim, dtype, 64, 200)
    key[:, :, 150] = 8 * query[:, :1, 0]
    check(query, key, value, causal)


@each_dtype
@pytest.mark.parametrize("kind", ["large", "strongly negative", "constant rows"])
def test_magnitudes(kind: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(128, dtype, 65, 130)
    if kind == "large":
        query *= 30
    elif kind == "strongly negative":
        query, key = -query.abs() * 20, key.abs()
    else:
        query[...], key[...] = query[:, :, :1], key[:, :, :1]
    check(query, key, value, True)


GROWTHS = {
    "less than 8": [2.0 * tile for tile in range(6)],  # binary logarithms, in the order of the tiles
    "more than 8": [12.0 * tile for tile in range(6)],
    "one late jump": [0.0, 1.0, 0.5, 0.0, 1.0, 40.0],
    "a fall and a rise": [30.0, -60.0, -200.0, 20.0, 37.0, 39.0],
    "strongly negative": [-900.0, -894.0, -880.0, -881.0, -860.0, -859.0],
}


def growing_inputs(growth: str, head_dim: int, dtype: torch.dtype, block_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws tensors of 40 queries and six tiles of keys whose scores grow from tile to tile; in every second row they
    fall."""
    query, key, value = inputs(head_dim, dtype, 40, 6 * block_n)
    level = torch.tensor(GROWTHS[growth][::-1]).repeat_interleave(block_n) * 0.6931 / head_dim**0.5
    direction = torch.where(torch.arange(head_dim) % 2 == 0, 1.0, -1.0)
    key = (key.float().cpu() * 0.2 + level[:, None] * direction).to(DEVICE, dtype)
    sign = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    query = (query.float().cpu() * 0.1 + sign[:, None] * direction).to(DEVICE, dtype)
    return query, key, value


@pytest.mark.parametrize(
    ("growth", "head_dim", "causal", "dtype"),
    in_turn(in_turn(itertools.product(GROWTHS, HEAD_DIMS), [False, True]), DTYPES),
    ids=str,
)
def test_maxima_that_grow_from_tile_to_tile(growth: str, head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    """Maxima grow by less and by more than what makes a row's reference follow."""
    block_n = 32 if head_dim == 256 else 64
    check(*growing_inputs(growth, head_dim, dtype, block_n), causal)


# --- Layouts ----------------------------------------------------------------------------------------------------------

KEYS = {
    "contiguous": lambda: normal_keys(2, 2, 9, 32),
    "BSHD": lambda: normal_keys(2, 9, 2, 32).transpose(1, 2),
    "one head": lambda: normal_keys(2, 1, 9, 32).expand(2, 2, 9, 32),
    "one batch": lambda: normal_keys(1, 2, 9, 32).expand(2, 2, 9, 32),
    "one row": lambda: normal_keys(2, 2, 1, 32).expand(2, 2, 9, 32),
    "overlapping rows": lambda: normal_keys(2, 2, 160).as_strided((2, 2, 9, 32), (320, 160, 16, 1)),
    "misaligned": lambda: normal_keys(2, 2, 9, 40)[..., 1:33],
    "packed": lambda: normal_keys(9, 2, 32),
    "one packed head": lambda: normal_keys(9, 1, 32).expand(9, 2, 32),
    "one packed row": lambda: normal_keys(1, 2, 32).expand(9, 2, 32),
}


def normal_keys(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)


@pytest.mark.parametrize("layout", KEYS)
def test_what_is_copied_is_explained(layout: str) -> None:
    """The library copies exactly the tensors that `explain` names."""
    key = KEYS[layout]()
    query = key.clone(memory_format=torch.contiguous_format)
    call: tuple[Any, ...] = (fastattn.attention, query, key, query)
    if key.dim() == 3:
        offsets = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
        call = (fastattn.attention_varlen, query, key, query, offsets, offsets, 9, 9)
    function, *arguments = call
    with fastattn.use_backend("cuda"), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out = function(*arguments)
        copied = fastattn.explain(*call).copied
    # a copy on the emulated device contains a copy on the CPU, which does not count
    copies = [
        event
        for event in seen.events() or []
        if event.name == "aten::copy_" and (event.cpu_parent is None or event.cpu_parent.name != event.name)
    ]
    assert len(copies) == len(copied) and copied.keys() <= {"key"}
    arguments[1] = query
    assert torch.equal(out, function(*arguments))


# --- Order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@each_dtype
def test_order_of_warps_and_copies_has_no_influence(head_dim: int, dtype: torch.dtype) -> None:
    problem = inputs(head_dim, dtype, 200, 300)
    with running(seed=100):
        first = run(*problem, True)
    with running(seed=1, workers=1):
        again = run(*problem, True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead"),
    [("cp.async.wait_group 0;", "cp.async.wait_group 1;"), ("bar.red.or.pred %p2, 0, %p1;", "mov.pred %p2, %p1;")],
    ids=["waits for one group less", "no barrier in masked steps"],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str) -> None:
    """The race detector names the copy at any seed. Without the detector, the result is wrong at one of a few seeds."""
    problem = inputs(64, torch.bfloat16, 128, 310)
    with cuda_runtime.replaced(instruction, instead):
        with pytest.raises(EmulatorError, match=r"cp_async\.cuh:\d+") as caught:
            check(*problem, False, {"uninitialised": False})
        assert caught.value.kind == "race"
        with pytest.raises(AssertionError):
            for seed in range(6):
                check(*problem, False, {"seed": seed, "uninitialised": False, "races": False})
    check(*problem, False)


@only_emulated
def test_an_overrun_is_an_error_that_says_where() -> None:
    """The key tensor's memory is cut short, so that the second tile of keys reads beyond it."""
    query, key, value = inputs(64, torch.float16, 64, 128)
    key.untyped_storage().resize_(2 * 64 * 100)
    with pytest.raises(EmulatorError) as caught, running(seed=3):
        run(query, key, value, False)
    error = caught.value
    assert error.kind == "out-of-bounds" and error.cta is not None and error.thread is not None
    assert error.kernel is not None and "attention_forward_sm80" in error.kernel
    assert error.text is not None and error.text.startswith("cp.async")
    assert error.source is not None and "cp_async.cuh" in error.source
    assert "attention_forward_sm80<64, float16> could not be launched" in str(error.__cause__)


# --- The dispatcher and the op ----------------------------------------------------------------------------------------


@each_head_dim
@each_dtype
@each_mask
def test_the_dispatcher_chooses_the_kernel(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    query, key, value = inputs(head_dim, dtype, 20, 30)
    explained = fastattn.explain(fastattn.attention, query, key, value, causal=causal)
    tile_dim = max(head_dim, 64) if FAMILY == 90 else head_dim
    has_few_keys = head_dim == 128 and kernel_facts(query.device).shared_memory_bytes < 163 << 10
    few_keys = ", few keys" if has_few_keys else ""
    name = f"attention_forward_sm{FAMILY}<{tile_dim}, {str(dtype).removeprefix('torch.')}{few_keys}>"
    assert (explained.backend, explained.kernel) == ("cuda", name)
    with fastattn.record() as calls, running():
        fastattn.attention(query, key, value, causal=causal)
    assert calls == [("attention", "cuda", name)]


@only_emulated
@pytest.mark.parametrize(("arch", "few_keys"), [(80, ", few keys"), (90, "")])
def test_other_gpus(arch: int, few_keys: str) -> None:
    problem = inputs(128, torch.bfloat16, 70, 90)
    with device.emulated(arch, num_sms=3):
        assert fastattn.explain(fastattn.attention, *problem).backend == "cuda"
        check(*problem, True)
    too_small = device.emulated(arch, shared_memory_bytes=40 * 1024)
    words = rf"128, bfloat16{few_keys}> could not be launched: .*40960 for a CTA"
    with too_small, pytest.raises(RuntimeError, match=words):
        run(*problem, False)


@only_emulated
@pytest.mark.parametrize(
    ("head_dim", "block_n", "threads"),
    [(32, 64, 128), (64, 64, 128), (96, 64, 128), (128, 64, 128), (192, 64, 256), (256, 32, 256)],
)
def test_the_launch_is_the_one_that_a_gpu_would_get(head_dim: int, block_n: int, threads: int) -> None:
    """A CTA has 128 rows and the shared memory of Q, K and V; the tensor cores do no more than the tiles' work."""
    with running(), launches.recorded() as found:
        run(*inputs(head_dim, torch.bfloat16, 200, 128, heads=(2, 1)), False)
    (launched,) = found
    assert launched.grid == (2 * 2, 1, 1) and launched.block == (threads, 1, 1)
    for_masks = 128  # bytes, with which masked tiles find the bounds of each row's keys
    assert launched.report.shared_bytes == (128 + 2 * block_n) * head_dim * 2 + for_masks
    assert launched.report.bank_conflicts == 0
    (work,) = launched.report.tensor_core.values()
    assert work.multiply_adds == 2 * (2 * 128) * 128 * head_dim * 2


def test_opcheck() -> None:
    small, grouped = inputs(64, torch.float16, 5, 9), inputs(128, torch.bfloat16, 20, 30, heads=(4, 2), batch=2)
    transposed = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in grouped)
    for changed in (
        arguments(*small),
        arguments(*grouped, window_right=0),
        arguments(*transposed, window_right=0, first_row=0, scale=-0.1),
    ):
        with running():
            torch.library.opcheck(getattr(torch.ops.fastattn, OP).default, (), changed)


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


Q, K = (2, 4, 5, 64), (2, 2, 7, 64)
# name: (changed arguments, words of the message)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"query": zeros(4, 5, 64)}, "query must have 4 dimensions, got shape [4, 5, 64]"),
    "key rank": ({"key": zeros(7, 64)}, "key must have 4 dimensions, got shape [7, 64]"),
    "key dtype": (
        {"key": zeros(*K, dtype=torch.bfloat16)},
        "key must have the dtype of query, float16, got bfloat16",
    ),
    "batch": ({"key": zeros(1, 2, 7, 64)}, "key must have shape [2, 2, 7, 64], got [1, 2, 7, 64]"),
    "value length": ({"value": zeros(2, 2, 6, 64)}, "value must have shape [2, 2, 7, 64], got [2, 2, 6, 64]"),
    "head counts": (
        {"key": zeros(2, 3, 7, 64), "value": zeros(2, 3, 7, 64)},
        "query must have a multiple of the heads of key (dim 1 of both), got 4 and 3",
    ),
    "dtype": (
        {name: torch.zeros(shape, device=DEVICE) for name, shape in (("query", Q), ("key", K), ("value", K))},
        "query must be float16 or bfloat16 for the native kernel, got float32",
    ),
    "head dim": (
        {"query": zeros(2, 4, 5, 20), "key": zeros(2, 2, 7, 20), "value": zeros(2, 2, 7, 20)},
        "query must have a last dim (head dim) that is a multiple of 8 up to 256, got 20",
    ),
    "value head dim": (
        {"value": zeros(2, 2, 7, 264)},
        "value must have a last dim (head dim) that is a multiple of 8 up to 256, got 264",
    ),
    "bias shape": (
        {"bias": zeros(1, 1, 5, 6)},
        "bias must have size 7 or 1 in dim 3, got shape [1, 1, 5, 6]",
    ),
    "bias rank": ({"bias": zeros(5, 7)}, "bias must have 4 dimensions, got shape [5, 7]"),
    "bias dtype": (
        {"bias": zeros(1, 1, 5, 7, dtype=torch.float64)},
        "bias must be bool, float16, bfloat16 or float32 for the native kernel, got float64",
    ),
    "alibi dtype": ({"alibi_slopes": zeros(1, 4)}, "alibi_slopes must be float32, got float16"),
    "alibi shape": (
        {"alibi_slopes": zeros(2, 3, dtype=torch.float32)},
        "alibi_slopes must have shape [2, 4], got [2, 3]",
    ),
    "sinks": ({"sinks": zeros(3, dtype=torch.float32)}, "sinks must have shape [4], got [3]"),
    "one of the offsets": (
        {"cu_seqlens_q": zeros(3, dtype=torch.int32)},
        "cu_seqlens_q and cu_seqlens_k must both be given, or neither",
    ),
    "packed rank": (
        {name: zeros(3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
        "query must have 3 dimensions, got shape [2, 4, 5, 64]",
    ),
    "no seed": (
        {"dropout_p": 0.5},
        "dropout_seed must be an int64 tensor of one element if dropout_p > 0, got None",
    ),
    "seed": (
        {"dropout_p": 0.5, "dropout_seed": zeros(1)},
        "dropout_seed must be an int64 tensor of one element, got float16 [1]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_the_op(name: str) -> None:
    changed, words = BAD[name]
    with pytest.raises(RuntimeError, match=re.escape(f"fastattn.{OP}: {words}")):
        getattr(torch.ops.fastattn, OP)(**{**arguments(zeros(*Q), zeros(*K), zeros(*K)), **changed})


def test_a_raw_op_has_no_gradient() -> None:
    query, key, value = inputs(64, torch.float16, 5, 9)
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        getattr(torch.ops.fastattn, OP)(**arguments(query.requires_grad_(), key, value))


def test_every_instance_is_launched() -> None:
    """The tables above have exactly the head dims, dtypes and masks that are compiled."""
    plain = sorted(
        [*itertools.product(HEAD_DIMS, instances.DTYPES, (False,)), *((128, dtype, True) for dtype in instances.DTYPES)]
    )
    options = sorted(itertools.product(HEAD_DIMS, instances.DTYPES, (False, True)))  # True: paged keys
    assert instances.rows_of("attention/instances/forward_sm80.cu") == plain
    assert instances.rows_of("attention/instances/forward_options_sm80.cu") == options
