"""Makes calls of flash-decoding, and compares their results with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.quantization import FP8
from kernel_device import DEVICE
from oracle import check_against_oracle

HUGE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """One call. Memory that must not be read holds NaN; unused entries of the block table are out of range."""

    name: str
    lengths: tuple[int, ...] = (37, 130, 1)
    heads: tuple[int, int] = (4, 2)
    queries: int = 1
    dims: tuple[int, int] = (32, 32)
    capacity: int = 150
    dtype: torch.dtype = torch.float16
    page_size: int = 0
    new: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "", "heads" or "batch"
    sinks: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    int8: bool = False
    fp8: str = ""  # "", or what has a scale each: "tokens", "heads", "tensor", "nobody"
    scale: float | None = None
    splits: int = 0
    batch_invariant: bool = False
    magnitude: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-seed{self.seed}"


def absent_rows(case: Case, batch: int) -> slice:
    """Returns the positions of a sequence that hold no token before the append."""
    return slice(min(max(case.lengths[batch], 0), case.capacity), case.capacity)


def aligned_rows(cache: Tensor) -> Tensor:
    """Returns a copy whose rows start at multiples of 16 bytes."""
    unit = 16 // cache.element_size()
    copy = cache.new_zeros(*cache.shape[:-1], -(-cache.shape[-1] // unit) * unit)[..., : cache.shape[-1]]
    return copy.copy_(cache)


def spoil(tensor: Tensor) -> None:
    """Fills a tensor with NaN."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(math.nan)


def comparable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == FP8 else tensor


def make_cache(
    case: Case, dim: int, block_table: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Returns a cache with NaN wherever there is no token, and its scales if each token has one."""
    batch, kv_heads = len(case.lengths), case.heads[1]
    rows = case.magnitude * torch.randn(batch, kv_heads, case.capacity, dim, generator=generator)
    rows = rows.to(case.dtype)
    scales = None
    if case.int8:
        rows, scales = reference.quantize_rows(rows)
    if case.fp8 == "tokens":
        rows, scales = reference.quantize_rows_fp8(rows)
    elif case.fp8:
        rows = reference.to_fp8(rows, None)
    spoiled = scales if scales is not None else rows
    for sequence in range(batch):
        spoil(spoiled[sequence, :, absent_rows(case, sequence)])
    if block_table is None:
        return rows, scales
    num_pages = batch * block_table.shape[1] + 3  # three pages that no sequence names
    pages = rows.new_zeros((num_pages, kv_heads, case.page_size, dim))
    if case.int8:
        pages.fill_(99)
    else:
        spoil(pages)
    page_scales = None if scales is None else scales.new_full((num_pages, kv_heads, case.page_size), math.nan)
    for sequence in range(batch):
        for index, page in enumerate(block_table[sequence].tolist()):
            part = slice(index * case.page_size, (index + 1) * case.page_size)
            pages[page] = rows[sequence, :, part]
            if page_scales is not None and scales is not None:
                page_scales[page] = scales[sequence, :, part]
    return pages, page_scales


def make_arguments(case: Case) -> dict[str, Any]:
    """Returns the arguments that ``reference.attention_with_kv_cache`` and the op have in common."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return (case.magnitude * torch.randn(*shape, generator=generator)).to(case.dtype)

    batch, (heads, kv_heads), (head_dim, value_dim) = len(case.lengths), case.heads, case.dims
    block_table = None
    if case.page_size:
        assert case.capacity % case.page_size == 0
        max_pages = case.capacity // case.page_size
        block_table = torch.randperm(batch * max_pages + 3, generator=generator)[: batch * max_pages]
        block_table = block_table.view(batch, max_pages).to(torch.int32)
    k_cache, k_scale = make_cache(case, head_dim, block_table, generator)
    v_cache, v_scale = make_cache(case, value_dim, block_table, generator)
    if case.fp8 in ("heads", "tensor"):
        shape = (kv_heads,) if case.fp8 == "heads" else ()
        k_scale, v_scale = (0.3 + torch.rand(shape, generator=generator) for _ in range(2))
    if block_table is not None:  # entries beyond the tokens name no page
        for sequence, length in enumerate(case.lengths):
            first_unused = -(-max(length + case.new, 0) // case.page_size)
            garbage = torch.tensor([HUGE, -7, -HUGE - 1, k_cache.shape[0]], dtype=torch.int32)
            unused = block_table[sequence, first_unused:]
            unused.copy_(garbage.repeat(unused.numel() // 4 + 1)[: unused.numel()])
    half = case.rotary_dim // 2
    angles = torch.rand(case.capacity, half, generator=generator) * 2 * math.pi
    arguments: dict[str, Any] = {
        "query": normal(batch, heads, case.queries, head_dim),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32),
        "k_new": normal(batch, kv_heads, case.new, head_dim) if case.new else None,
        "v_new": normal(batch, kv_heads, case.new, value_dim) if case.new else None,
        "rotary_cos": angles.cos().to(case.dtype) if half else None,
        "rotary_sin": angles.sin().to(case.dtype) if half else None,
        "rotary_interleaved": case.interleaved,
        "block_table": block_table,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "softcap": case.softcap,
        "alibi_slopes": None,
        "sinks": torch.randn(heads, generator=generator) if case.sinks else None,
        "scale": case.scale if case.scale is not None else 1 / math.sqrt(head_dim),
    }
    if case.alibi:
        shape = (batch, heads) if case.alibi == "batch" else (1, heads)
        arguments["alibi_slopes"] = torch.rand(shape, generator=generator)
    return clone({name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in arguments.items()})


def clone(arguments: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Returns a copy of the arguments; with floating tensors in ``dtype`` if given."""
    copies = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            copy = aligned_rows if name in ("k_cache", "v_cache") else Tensor.clone
            value = copy(value) if dtype is None or not value.is_floating_point() else value.to(dtype)
        copies[name] = value
    return copies


def op_arguments(case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the op ``attention_decode``, which changes the caches among them in place."""
    left, right = case.window
    return {
        **arguments,
        "window_left": left,
        "window_right": 0 if case.causal else right,
        "num_splits": case.splits,
        "batch_invariant": case.batch_invariant,
        "tree_mask": arguments.get("tree_mask"),
    }


# Returns output and lse of a case; the caches among its arguments change in place.
RunKernel = Callable[[Case, dict[str, Any]], tuple[Tensor, Tensor]]


def operator_of(ops: Any) -> RunKernel:
    """Returns a function that runs the op of ``ops``: ``torch.ops.fastattn`` or ``torch.ops.fastattn_triton``."""
    return lambda case, arguments: ops.attention_decode(**op_arguments(case, arguments))


def run_public(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs the public function, on the backend that is forced."""
    named = {name: value for name, value in arguments.items() if value is not None}
    options = {
        "causal": case.causal,
        "window": case.window,
        "num_splits": case.splits,
        "batch_invariant": case.batch_invariant,
    }
    return fastattn.attention_with_kv_cache(**named, **options, return_lse=True)


def check(case: Case, run_kernel: RunKernel, arguments: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """Asserts that the append gives the reference's bits, and that attention over the result meets the oracle."""
    arguments = arguments if arguments is not None else make_arguments(case)
    expected, inputs = clone(arguments), clone(arguments)
    options = {"causal": case.causal, "window": case.window}
    reference.attention_with_kv_cache(**expected, **options)
    out, lse = run_kernel(case, inputs)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if isinstance(arguments[name], Tensor):
            found, wanted = comparable(inputs[name]), comparable(expected[name])
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)

    # The caches are right, so the oracle attends over these very bits, with nothing left to append.
    expected["cache_seqlens"] = expected["cache_seqlens"].clamp(0, case.capacity) + case.new
    expected["k_new"] = expected["v_new"] = None
    oracle, oracle_lse = reference.attention_with_kv_cache(**clone(expected, torch.float64), **options)
    composite, composite_lse = reference.attention_with_kv_cache(**clone(expected), **options, compute_dtype=case.dtype)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    check_against_oracle("out", out, oracle, composite)
    check_against_oracle("lse", lse, oracle_lse, composite_lse)
    return out, lse


FP8_SCALES = ("tokens", "heads", "tensor", "nobody")
CASES = [
    Case("one-query"),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("not-causal", causal=False, queries=3),
    Case("lengths-out-of-range", lengths=(0, -5, 151, HUGE, 150)),
    Case("append-out-of-range", lengths=(0, -5, 149, 150, HUGE), new=2),
    Case("append-more-than-queries", lengths=(10, 0, 120), new=25, queries=2),
    Case("append-fewer-than-queries", lengths=(10, 0, 120), new=1, queries=5),
    Case("sixteen-queries", queries=16, lengths=(3, 70, 150)),
    Case("many-row-tiles", queries=9, heads=(16, 1), lengths=(3, 66, 150)),
    Case("mha", heads=(3, 3), lengths=(64, 65)),
    Case("gqa-8", heads=(8, 1), queries=2, lengths=(63, 129)),
    Case("gqa-16", heads=(32, 2), lengths=(128, 77)),
    Case("value-dim-wider", dims=(24, 64)),
    Case("value-dim-narrower", dims=(96, 8), lengths=(40, 5)),
    Case("dim-256", dims=(256, 256), lengths=(33, 70), queries=2),
    Case("window-left", window=(20, -1), queries=4, splits=3),
    Case("window-both-sides", window=(17, 2), causal=False, queries=7),
    Case("window-zero", window=(0, 0), queries=2),
    Case("window-past-everything", window=(HUGE, HUGE), causal=False, queries=2),
    Case("window-far-left-batch-invariant", window=(40, -1), lengths=(140, 7, 100), batch_invariant=True),
    Case("softcap", softcap=5.0, magnitude=2.0, queries=3),
    Case("softcap-bfloat16", softcap=30.0, magnitude=2.0, dtype=torch.bfloat16),
    Case("alibi", alibi="heads", queries=3),
    Case("alibi-batch-not-causal", alibi="batch", causal=False, queries=3),
    Case("sinks", sinks=True, lengths=(37, 0, 1)),
    Case("sinks-split", sinks=True, lengths=(137, 0, 1), splits=3),
    Case("rotary", rotary_dim=32, new=1),
    Case("rotary-interleaved", rotary_dim=32, interleaved=True, new=3, queries=3),
    Case("rotary-partial", rotary_dim=16, dims=(40, 16), new=2, queries=2),
    Case("rotary-partial-interleaved", rotary_dim=8, interleaved=True, dims=(40, 16), new=2),
    Case("rotary-out-of-range", rotary_dim=16, lengths=(-9, 0, HUGE), new=2, queries=4),
    Case("rotary-bfloat16", rotary_dim=32, new=2, queries=2, dtype=torch.bfloat16),
    Case("page-1", page_size=1, new=2),
    Case("page-16", page_size=16, capacity=160, new=20, queries=4),
    Case("page-48", page_size=48, capacity=192, lengths=(37, 191, 0, 96)),
    Case("page-64", page_size=64, capacity=192, lengths=(64, 128, 190), new=1, splits=2),
    Case("page-256", page_size=256, capacity=512, lengths=(300, 255, 511), new=1),
    Case("page-16-window", page_size=16, capacity=160, window=(30, -1), queries=3, alibi="heads"),
    Case("int8", int8=True),
    Case("int8-append", int8=True, new=3, queries=3, rotary_dim=32),
    Case("int8-bfloat16", int8=True, new=2, queries=2, dtype=torch.bfloat16),
    Case("int8-small-values", int8=True, magnitude=1e-4, scale=1e6),
    Case("int8-paged", int8=True, page_size=16, capacity=160, new=1, splits=3),
    Case("int8-page-48", int8=True, page_size=48, capacity=192, lengths=(37, 191, 0, 96), new=1),
    Case("int8-page-64", int8=True, page_size=64, capacity=192, new=2, dims=(16, 48)),
    *(Case(f"fp8-of-{whose}", fp8=whose) for whose in FP8_SCALES),
    *(Case(f"fp8-append-{whose}", fp8=whose, new=3, queries=3, rotary_dim=32) for whose in FP8_SCALES),
    Case("fp8-bfloat16", fp8="tensor", new=2, queries=2, dtype=torch.bfloat16),
    Case("fp8-tokens-bfloat16", fp8="tokens", new=2, queries=2, dtype=torch.bfloat16),
    Case("fp8-subnormal", fp8="nobody", magnitude=0.004, scale=1e3, new=2),
    Case("fp8-saturated", fp8="nobody", magnitude=300.0, scale=1e-4, new=5),
    Case("fp8-paged", fp8="heads", page_size=16, capacity=160, new=1, splits=3),
    Case("fp8-page-64", fp8="tokens", page_size=64, capacity=192, new=2, dims=(16, 48)),
    Case("fp8-window", fp8="heads", window=(17, 2), causal=False, queries=7, dims=(64, 128)),
    Case("fp8-everything", dims=(64, 32), heads=(8, 2), queries=3, new=3, page_size=16, capacity=160, window=(90, -1),
         softcap=8.0, alibi="batch", sinks=True, rotary_dim=32, fp8="heads", splits=2),
    Case("large-magnitude", magnitude=30.0),
    Case("negative-scale", scale=-0.3, queries=2),
    Case("zero-scale", scale=0.0),
    Case("everything", dims=(64, 32), heads=(8, 2), queries=3, new=3, page_size=16, capacity=160, window=(90, -1),
         softcap=8.0, alibi="batch", sinks=True, rotary_dim=32, int8=True, splits=2),
    Case("everything-16-bit", dims=(64, 32), heads=(8, 2), queries=3, new=3, page_size=64, capacity=192,
         window=(90, -1), softcap=8.0, alibi="batch", sinks=True, rotary_dim=32, interleaved=True, splits=2, seed=1),
]  # fmt: skip


def any_number_of_splits_meets_the_oracle(run_kernel: RunKernel, splits: int) -> None:
    check(Case("splits", lengths=(0, 5, 190, 448), capacity=448, queries=2, sinks=True, splits=splits), run_kernel)


def strongly_negative_scores(run_kernel: RunKernel) -> None:
    case = Case("negative")
    arguments = make_arguments(case)
    arguments["query"] = torch.full_like(arguments["query"], -20.0)
    arguments["k_cache"] = arguments["k_cache"].abs()
    check(case, run_kernel, arguments)


def a_dominant_key_gives_its_value(run_kernel: RunKernel) -> None:
    case = Case("dominant")
    arguments = make_arguments(case)
    arguments["query"] = torch.ones_like(arguments["query"])
    arguments["k_cache"][:, :, 0] = 60.0
    out, _ = check(case, run_kernel, arguments)
    torch.testing.assert_close(out[:, 0, 0], arguments["v_cache"][:, 0, 0].to(out.device), rtol=1e-3, atol=1e-3)


def pages_out_of_range_are_absent(run_kernel: RunKernel, int8: bool) -> None:
    case = Case("absent-pages", page_size=16, capacity=160, lengths=(100, 150, 33), new=2, int8=int8, splits=2)
    arguments = make_arguments(case)
    table = arguments["block_table"]
    # ``table[1, 9]`` is the page of sequence 1's new tokens.
    table[0, 1], table[0, 5], table[1, 9] = (
        HUGE,
        -1,
        arguments["k_cache"].shape[0],
    )
    table[2] = -5
    out, lse = check(case, run_kernel, arguments)
    assert bool((out[2] == 0).all()) and bool((lse[2] == -math.inf).all())


def a_cache_without_pages(run_kernel: RunKernel) -> None:
    case = Case("no-pages", page_size=16, capacity=32, lengths=(20,))
    arguments = make_arguments(case)
    arguments["k_cache"] = arguments["k_cache"][:0]
    arguments["v_cache"] = arguments["v_cache"][:0]
    out, lse = run_kernel(case, arguments)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


def nan_reaches_only_rows_that_see_it(run_kernel: RunKernel, spoil: str) -> None:
    """Only the last of four causal queries sees the spoiled key, which lies in the same tile as all others."""
    case = Case("nan", queries=4, int8=spoil.endswith("scale"), lengths=(70, 12))
    arguments = make_arguments(case)
    for sequence, length in enumerate(case.lengths):
        arguments[spoil][sequence, :, length - 1] = math.nan
    out, lse = check(case, run_kernel, arguments)
    assert not bool(out[:, :, :3].isnan().any()) and bool(out[:, :, 3].isnan().all())
    assert bool(lse[:, :, 3].isnan().all()) == spoil.startswith("k_")


def nan_in_one_split_reaches_the_result(run_kernel: RunKernel) -> None:
    case = Case("nan-split", splits=3, lengths=(150,))
    arguments = make_arguments(case)
    arguments["v_cache"][0, 0, 70] = math.nan
    out, _ = check(case, run_kernel, arguments)
    assert bool(out[0, :2].isnan().all()) and not bool(out[0, 2:].isnan().any())


def new_keys_that_are_not_finite_stay_visible(run_kernel: RunKernel) -> None:
    case = Case("nan-append", int8=True, new=2, lengths=(3, 20))
    arguments = make_arguments(case)
    arguments["v_new"][0, 0, 1, 5] = math.nan
    out, _ = run_kernel(case, arguments)
    assert bool(out[0, :2].isnan().all()) and not bool(out[0, 2:].isnan().any()) and not bool(out[1].isnan().any())


def views_are_read_and_written_in_place(run_kernel: RunKernel) -> None:
    """Caches, new keys and queries may be transposed or sliced views; the output follows the query's layout."""
    case = Case("views", new=2, queries=2, lengths=(20, 100), rotary_dim=32)
    plain = make_arguments(case)
    views = clone(plain)
    for name in ("query", "k_new", "v_new"):  # [B, S, H, D] in memory
        views[name] = plain[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("k_cache", "v_cache"):  # a slice of a larger cache, [B, rows, Hkv, D] in memory
        batch, kv_heads, rows, dim = plain[name].shape
        larger = plain[name].new_full((batch, rows + 3, kv_heads, dim + 8), math.nan)
        views[name] = larger.transpose(1, 2)[:, :, :rows, :dim]
        views[name].copy_(plain[name])
    out, lse = run_kernel(case, views)
    expected_out, expected_lse = run_kernel(case, plain)
    assert out.transpose(1, 2).is_contiguous() and expected_out.is_contiguous()
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(views[name], plain[name], rtol=0, atol=0, equal_nan=True)


def a_query_that_is_misaligned_is_copied(run_kernel: RunKernel) -> None:
    case = Case("misaligned")
    arguments = make_arguments(case)
    storage = torch.empty(arguments["query"].numel() + 1, dtype=case.dtype, device=DEVICE)
    arguments["query"] = storage[1:].view_as(arguments["query"]).copy_(arguments["query"])
    check(case, run_kernel, arguments)


def nothing_to_do(run_kernel: RunKernel, what: str) -> None:
    case = Case("empty", new=2, capacity=0 if what == "capacity" else 8, lengths=() if what == "batch" else (3, 1))
    case = replace(case, queries=0) if what == "queries" else case
    check(case, run_kernel)  # without queries too, the new tokens are appended


def same_bits_alone(case: Case, run_kernel: RunKernel) -> None:
    """A sequence has the same bits alone as in a batch that the scheduler would otherwise split differently."""
    arguments = make_arguments(case)
    together = run_kernel(case, clone(arguments))
    for sequence in range(len(case.lengths)):
        alone = clone(arguments)
        for name in ("query", "k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens"):
            if arguments[name] is not None:
                alone[name] = arguments[name][sequence : sequence + 1].clone()
        for result, expected in zip(run_kernel(case, alone), together, strict=True):
            assert torch.equal(result[0], expected[sequence])


# The behaviour that every implementation of the op must have, by name.
SCENARIOS: dict[str, Callable[[RunKernel], None]] = {
    **{
        f"any number of splits meets the oracle, {splits}": partial(
            any_number_of_splits_meets_the_oracle, splits=splits
        )
        for splits in (1, 2, 3, 7, 1000)
    },
    "strongly negative scores": strongly_negative_scores,
    "a dominant key gives its value": a_dominant_key_gives_its_value,
    **{
        f"pages out of range are absent, int8={int8}": partial(pages_out_of_range_are_absent, int8=int8)
        for int8 in (False, True)
    },
    "a cache without pages": a_cache_without_pages,
    **{
        f"nan reaches only rows that see it, {spoil}": partial(nan_reaches_only_rows_that_see_it, spoil=spoil)
        for spoil in ("k_cache", "v_cache", "k_scale", "v_scale")
    },
    "nan in one split reaches the result": nan_in_one_split_reaches_the_result,
    "new keys that are not finite stay visible": new_keys_that_are_not_finite_stay_visible,
    "views are read and written in place": views_are_read_and_written_in_place,
    "a query that is misaligned is copied": a_query_that_is_misaligned_is_copied,
    **{f"no {what}": partial(nothing_to_do, what=what) for what in ("batch", "queries", "capacity")},
}
