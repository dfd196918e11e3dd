"""Tests flash-decoding's CUDA C++ kernels through their op against the oracle; on a GPU, else on the emulator."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import decode_cases
import fastattn
import instances
from cuda_kernels import DTYPES, EMULATED, MARKS, checked, each_dtype, only_emulated
from decode_cases import CASES, HUGE, SCENARIOS, Case, make_arguments, op_arguments
from fastattn import native
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = MARKS
each_cache = pytest.mark.parametrize("int8", (False, True), ids=["16-bit", "int8"])

KERNEL = "decode_split_sm80"
HEAD_DIMS = (64, 128, 256)  # head dims of the instances
CACHES = ("k_cache", "v_cache")
SEQUENCES = ("query", *CACHES, "k_scale", "v_scale", "cache_seqlens")  # arguments with a batch


def run_kernel(case: Case, arguments: dict[str, Any], **launching: Any) -> tuple[Tensor, Tensor]:
    """Runs the op, which changes the caches among the arguments in place."""
    with checked(**{"seed": case.seed, **launching}):
        return torch.ops.fastattn.attention_decode(**op_arguments(case, arguments))


def check(case: Case, arguments: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    return decode_cases.check(case, run_kernel, arguments)


def with_cache(case: Case, cache: str) -> Case:
    return replace(case, int8=cache == "int8", fp8="tensor" if cache == "fp8" else "")


# --- What every implementation does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name: str) -> None:
    SCENARIOS[name](run_kernel)


# --- Shapes and positions ---------------------------------------------------------------------------------------------

# Each instance's own head dim and some below, with values narrower and wider than keys.
DIMS = [(64, 64), (8, 24), (56, 64), (128, 128), (80, 72), (16, 128), (256, 256), (192, 136), (248, 8)]


@each_dtype
@each_cache
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], int8: bool, dtype: torch.dtype) -> None:
    check(Case("dims", dims=dims, dtype=dtype, int8=int8, lengths=(90, 150, 0), queries=2, new=2, heads=(4, 2)))


@each_cache
@pytest.mark.parametrize("page_size", (1, 2, 4, 8, 16, 24, 32, 48, 128))
def test_page_sizes(page_size: int, int8: bool) -> None:
    capacity = 192 if 192 % page_size == 0 else 256
    check(Case("pages", page_size=page_size, capacity=capacity, lengths=(100, 3, 189), new=3, int8=int8, dims=(64, 40)))


ALIKE = {"rotary_dim": 16, "alibi": "batch", "softcap": 9.0, "sinks": True, "new": 5, "lengths": (0, 61, 128, 145, 200)}


@each_dtype
@each_cache
@pytest.mark.parametrize(
    "case",
    [
        Case("one-query", queries=1, **ALIKE),
        Case("mask-among-new", queries=16, heads=(6, 2), window=(70, -1), **ALIKE),
        Case("new-tokens-that-nobody-sees", queries=2, window=(1, -1), causal=False, **ALIKE),
        Case("row-tiles-and-pages", queries=7, heads=(10, 2), page_size=16, capacity=208, splits=3, **ALIKE),
        Case("right-of-the-last", queries=9, window=(30, 4), causal=False, interleaved=True, **ALIKE),
    ],
    ids=lambda case: case.name,
)
def test_everything_at_once(case: Case, int8: bool, dtype: torch.dtype) -> None:
    seed = 2 * DTYPES.index(dtype) + int8
    check(replace(case, dtype=dtype, int8=int8, seed=seed, capacity=case.capacity + 54 * (not case.page_size)))


@each_cache
def test_a_prompt_is_appended_and_attended_to(int8: bool) -> None:
    """There are as many queries as new tokens, in many tiles of rows, the last of which writes the tokens."""
    check(Case("prompt", queries=70, new=70, lengths=(0, 5), capacity=96, heads=(4, 2), rotary_dim=32, int8=int8))


@pytest.mark.parametrize(
    ("kind", "rotary_dim", "interleaved"),
    in_turn(
        itertools.product((torch.float32, torch.float64, torch.float16, torch.bfloat16), (16, 24, 26)), (False, True)
    ),
    ids=str,
)
def test_angles_of_any_dtype(kind: torch.dtype, rotary_dim: int, interleaved: bool) -> None:
    """The angles of 8 elements are adjacent or in two halves, and may end among them. Tables are 16-byte aligned or
    not."""
    case = Case("angles", rotary_dim=rotary_dim, interleaved=interleaved, new=2, queries=2)
    arguments = make_arguments(case)
    tables = {name: arguments[name].to(kind) for name in ("rotary_cos", "rotary_sin")}
    check(case, arguments | tables)
    elsewhere = {name: torch.cat((table[0, :1], table.flatten()))[1:].view_as(table) for name, table in tables.items()}
    assert all(table.data_ptr() % 16 for table in elsewhere.values())
    check(case, arguments | elsewhere)


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("growing", "shrinking", "zero", "negative"))
@each_dtype
def test_scales_of_values_far_apart(kind: str, dtype: torch.dtype) -> None:
    """The scales differ within a tile and from tile to tile."""
    case = Case("scales", int8=True, lengths=(150,), dtype=dtype, splits=1, scale=0.01)
    arguments = make_arguments(case)
    scales = arguments["v_scale"][:, :, :150]
    if kind == "zero":
        scales[..., 20:100] = 0.0
    elif kind == "negative":
        scales *= -1
    else:
        factors = torch.logspace(-6, 4, 150, device=DEVICE)
        scales *= factors if kind == "growing" else factors.flip(0)
    if dtype == torch.bfloat16 or kind in ("zero", "negative"):
        check(case, arguments)
        return
    arguments["v_scale"] *= 1e-2  # float16 then holds the results
    check(case, arguments)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "at", "cache", "spoiled"),
    [
        *(((4, 2), 53, cache, math.inf) for cache in ("16-bit", "int8")),
        *(((16, 2), 52, cache, math.nan) for cache in native.CACHE_FORMATS),  # rows of two warps
    ],
    ids=str,
)
def test_masked_values_have_no_influence(
    heads: tuple[int, int], at: int, cache: str, spoiled: float, dtype: torch.dtype
) -> None:
    """Values at the edge of a window that are not finite reach the rows that see them, and do not change the bits of
    other rows, of the same warp or of another."""
    case = with_cache(Case("edge", (75,), heads, 4, window=(20, -1), dtype=dtype), cache)
    clean, dirty = make_arguments(case), make_arguments(case)
    dirty["v_scale" if cache == "int8" else "v_cache"][:, :, at] = spoiled
    (out, lse), (expected, expected_lse) = run_kernel(case, dirty), run_kernel(case, clean)
    position = torch.arange(71, 75, device=DEVICE)
    sees = (position - 20 <= at).expand(out.shape[:3])
    assert sees.any() and not sees.all()
    assert torch.equal(out[~sees], expected[~sees]) and torch.equal(lse, expected_lse)
    if math.isnan(spoiled):
        assert out[sees].isnan().any(dim=-1).all()
    assert not out[sees].isfinite().all(dim=-1).any()


@each_cache
def test_lengths_and_tables_are_not_trusted(int8: bool) -> None:
    """With any lengths and tables, nothing outside of the tensors is touched. Sequences may write to the same page."""
    case = Case("rubbish", page_size=16, capacity=96, lengths=(40, 9, 77), new=3, queries=2, int8=int8)
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        arguments = make_arguments(case)
        pages, table = arguments["k_cache"].shape[0], arguments["block_table"]
        rubbish = torch.tensor([HUGE, -HUGE - 1, -1, pages, pages - 1, 0])
        drawn = torch.randint(len(rubbish), table.shape, generator=generator)
        table.copy_(torch.where(drawn % 2 == 0, rubbish[drawn], table.cpu()))
        lengths = torch.tensor([HUGE, -HUGE - 1, 96, 95, 1000, -3])
        arguments["cache_seqlens"].copy_(lengths[torch.randint(6, (3,), generator=generator)])
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            if isinstance(arguments[name], Tensor):
                arguments[name] = arguments[name].nan_to_num()
        out, lse = run_kernel(case, arguments, races=False)
        assert not out.isnan().any() and not lse.isnan().any()


# --- Tiles of 32 rows: two warps share each ring ----------------------------------------------------------------------

each_format = pytest.mark.parametrize("cache", native.CACHE_FORMATS)


@pytest.mark.parametrize(
    ("dims", "cache", "dtype", "rows"),
    in_turn(
        itertools.product([(64, 64), (128, 104), (256, 256)], native.CACHE_FORMATS, DTYPES),
        [((17, 1), 1), ((32, 1), 1), ((16, 2), 4), ((6, 2), 16), ((33, 1), 2)],
        each=2,
    ),
    ids=str,
)
def test_many_rows(dims: tuple[int, int], cache: str, dtype: torch.dtype, rows: tuple[tuple[int, int], int]) -> None:
    """A KV head has 17, 32, 48 or 66 rows: tiles are full, end within a warp's rows, or have rows of one warp only."""
    heads, queries = rows
    case = Case("rows", (150, 0, 77), heads, dims=dims, queries=queries, new=queries, dtype=dtype, capacity=160)
    check(with_cache(case, cache))


@each_format
@pytest.mark.parametrize("page_size", [0, 2, 16])
def test_many_rows_with_everything_at_once(page_size: int, cache: str) -> None:
    case = Case("rows-and-all", heads=(12, 2), queries=5, page_size=page_size, splits=3, window=(70, -1), **ALIKE)
    check(replace(with_cache(case, cache), seed=page_size, capacity=256))


@only_emulated
def test_a_barrier_that_is_missing_between_the_warps_is_found() -> None:
    """Removes the barriers at which the two warps wait for each other in the loop."""
    case = Case("fault", (300, 290), (32, 1), dims=(128, 128), capacity=320)
    with cuda_runtime.replaced("bar.sync %r", "bar.sync 15, 32; //"), pytest.raises(EmulatorError) as caught:
        run_kernel(case, make_arguments(case), uninitialised=False)
    assert caught.value.kind == "race", str(caught.value)
    check(case)


def test_a_gpu_with_little_shared_memory_has_tiles_of_16_rows_where_32_do_not_fit() -> None:
    for dim, name in ((128, "<128, float16, 32 rows>"), (256, "<256, float16>")):
        assert native.decode_kernel(86, 99 << 10, dim, torch.float16, "16-bit", rows=32) == f"{KERNEL}{name}"
    assert (
        native.decode_kernel(80, 163 << 10, 256, torch.float16, "int8", 17) == f"{KERNEL}<256, float16, int8, 32 rows>"
    )
    assert native.decode_kernel(80, 163 << 10, 256, torch.float16, "fp8", 16) == f"{KERNEL}<256, float16, fp8>"


# --- The splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (1500, -1)], ids=["full", "window"])
@each_cache
def test_batch_invariant_bits(window: tuple[int, int], int8: bool) -> None:
    lengths = (2100, 5, 1024, 1500)
    case = Case("invariant", (2100, 5, 1024, 1500), (2, 1), capacity=2200, window=window, batch_invariant=True)
    assert max(lengths) > 2 * 1024  # several splits
    decode_cases.same_bits_alone(replace(case, int8=int8), run_kernel)


@only_emulated
@each_cache
def test_batch_invariant_bits_on_any_gpu(int8: bool) -> None:
    """A sequence has the same bits alone, among 64, and in a larger cache, on GPUs of any size."""
    lengths = (5000, *(1 + i % 5 for i in range(62)), 3100)
    case = Case("gpus", lengths, (2, 1), dims=(16, 16), capacity=5200, sinks=True, batch_invariant=True, int8=int8)
    arguments = make_arguments(case)
    first = {name: value[:1] if name in SEQUENCES and value is not None else value for name, value in arguments.items()}
    larger = {name: torch.cat([value] * 2, dim=2) if name in CACHES else value for name, value in first.items()}
    if int8:
        for name in ("k_scale", "v_scale"):
            larger[name] = torch.cat([first[name]] * 2, dim=2)
    found = []
    for call, num_sms in ((arguments, 132), (arguments, 2), (first, 1), (first, 132), (larger, 3)):
        with device.emulated(num_sms=num_sms), launches.recorded() as launched:
            out, lse = run_kernel(case, decode_cases.clone(call))
        assert launched[0].grid[0] <= (3 if int8 else 2) * num_sms  # CTAs per SM of the instance for 64 dims
        found.append((out[0], lse[0]))
    assert all(torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1]) for out, lse in found)
    check(replace(case, lengths=(5000,)), decode_cases.clone(first))


@only_emulated
@pytest.mark.parametrize("seed", range(3))
def test_a_cta_has_what_lies_between_its_first_and_last_node(seed: int) -> None:
    """Of a sequence's 33 splits, one CTA has the first and another the rest. With 16 splits per node, both CTAs have
    splits of the first node; one CTA has the two others. In any order of arrival, no node is left out."""
    lengths = (31 * 1024, 33 * 1024)
    case = Case("between", lengths, (1, 1), dims=(16, 16), capacity=33 * 1024, batch_invariant=True, seed=seed)
    with device.emulated(num_sms=1), launches.recorded() as launched:
        check(case)
    assert launched[0].grid[0] == 2


ORDERED = Case("order", (300, 10, 440), capacity=448, queries=2, new=2, sinks=True, page_size=16)
MANY_ROWS = replace(ORDERED, heads=(48, 2), queries=1, new=1)


@pytest.mark.parametrize(
    ("case", "cache"),
    [(ORDERED, "16-bit"), (ORDERED, "int8"), *((MANY_ROWS, cache) for cache in native.CACHE_FORMATS)],
    ids=str,
)
def test_order_of_warps_and_copies_has_no_influence(case: Case, cache: str) -> None:
    case = with_cache(case, cache)
    first, again = make_arguments(case), make_arguments(case)
    results = run_kernel(case, first, **({"seed": 100} if EMULATED else {}))
    repeated = run_kernel(case, again, **({"seed": 1, "workers": 1} if EMULATED else {}))
    assert all(torch.equal(a, b) for a, b in zip(results, repeated, strict=True))
    for name in CACHES:
        found, wanted = decode_cases.comparable(again[name]), decode_cases.comparable(first[name])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@each_cache
@pytest.mark.parametrize(("dim", "splits"), [(16, 16), (16, 17), (16, 257), (72, 17), (72, 33)])
def test_many_partials_are_combined_in_a_tree(dim: int, splits: int, int8: bool) -> None:
    """The tree has up to 3 levels of 16 partials, or 2 of 32; a second tile has fewer. Any order gives equal bits."""
    case = Case("splits", (64 * splits, 300), (2, 1), dims=(dim, dim), capacity=64 * splits, splits=splits, sinks=True)
    case = replace(case, int8=int8)
    with device.emulated(num_sms=16) if EMULATED else contextlib.nullcontext():  # fewer CTAs at a time take less memory
        check(case)
        first, second = (
            run_kernel(case, make_arguments(case), **({"seed": seed, "workers": 1} if EMULATED else {}))
            for seed in (5, 6)
        )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@only_emulated
@pytest.mark.parametrize("num_sms", (1, 7, 132))
def test_any_number_of_multiprocessors_meets_the_oracle(num_sms: int) -> None:
    with device.emulated(num_sms=num_sms):
        check(Case("sms", lengths=(448, 0, 17, 300), capacity=448, queries=2, sinks=True, heads=(4, 2)))


def test_instances_are_those_of_the_tables_above() -> None:
    assert instances.kernels_of("decode") == ["split_sm80", "append_sm80", "dequantize_sm80"]
    expected = sorted(itertools.product(HEAD_DIMS, (16, 32), instances.DTYPES, native.CACHE_FORMATS))
    assert instances.rows_of("decode/instances/split_sm80.cu") == expected


# --- What the emulator counts -----------------------------------------------------------------------------------------


@only_emulated
@each_cache
@pytest.mark.parametrize("page_size", (0, 16), ids=["contiguous", "paged"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (80, 48)], ids=str)
def test_bytes_moved(dims: tuple[int, int], page_size: int, int8: bool) -> None:
    """Bytes are within 3 % of the minimum: each sector moves once, without bank conflicts. Partials are extra."""
    case = Case("bytes", (2000, 1000), (8, 2), dims=dims, capacity=2048, page_size=page_size, int8=int8)
    with device.emulated(num_sms=2), launches.recorded() as found:
        run_kernel(case, make_arguments(case))
    (report,) = (launched.report for launched in found)
    assert KERNEL in report.kernel
    tokens, itemsize = 2 * sum(case.lengths), 1 if int8 else 2
    least = tokens * (sum(dims) * itemsize + 8 * int8) + 16 * (2 * sum(dims) + 4)
    # nvcc 13.0 splits a store that stages the output into two: 112 conflicts at 256 dims of an int8 cache.
    assert {row.opcode[:9] for row in report.rows if row.bank_conflicts} <= {"st.shared"}
    assert report.bank_conflicts <= 1e-2 * report.shared_wavefronts
    copies = [row for row in report.rows if row.opcode.startswith("cp.async.c")]
    partials = 2 * 32 * sum(row.global_sectors for row in report.rows if row.opcode.startswith("st.global"))
    copied, of_caches = sum(row.global_bytes for row in copies), tokens * (sum(dims) * itemsize + 8 * int8)
    assert of_caches <= copied <= of_caches + partials / 2  # partials are copied, too
    assert sum(32 * row.global_sectors for row in copies) == copied
    assert 32 * report.global_sectors <= 1.03 * least + partials


@only_emulated
@each_cache
@pytest.mark.parametrize("rows, times", [(1, 1), (16, 1), (17, 1), (32, 1), (33, 2)])
def test_up_to_32_rows_load_each_key_once(rows: int, times: int, int8: bool) -> None:
    case = Case("rows", (700,), (rows, 1), dims=(128, 64), capacity=704, splits=1, int8=int8)
    with launches.recorded() as found:
        run_kernel(case, make_arguments(case))
    (report,) = (launched.report for launched in found)
    copies = [row for row in report.rows if row.opcode.startswith("cp.async.c")]
    assert sum(row.global_bytes for row in copies) == times * 700 * ((128 + 64) * (1 if int8 else 2) + 8 * int8)
    assert {row.opcode[:9] for row in report.rows if row.bank_conflicts} <= {"st.shared"}  # see test_bytes_moved


@only_emulated
@each_dtype
@pytest.mark.parametrize("architecture, cache", [*((80, cache) for cache in native.CACHE_FORMATS), (90, "fp8")])
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_instructions_for_16_keys(dim: int, architecture: int, cache: str, dtype: torch.dtype) -> None:
    """Counts PTX instructions where all rows see all keys. The number varies with how often a maximum changes; pages
    add reads of the block table. test_native_library.py counts machine code."""
    expected = {
        "16-bit": (383, 462, 586),
        "int8": (384, 508, 934),
        "fp8": (507, 751, 1414) if architecture == 80 else (363, 472, 858),  # by bits, or one instruction
    }[cache][(64, 128, 256).index(dim)]

    def executed(length: int, page_size: int) -> int:
        case = Case("step", (length,), (4, 1), dims=(dim, dim), capacity=2048, page_size=page_size, splits=1)
        case = with_cache(replace(case, dtype=dtype), cache)
        with device.emulated(architecture), launches.recorded() as found:
            run_kernel(case, make_arguments(case))
        return sum(row.warps for row in found[0].report.rows)

    for page_size, more in ((0, 0), (16, 27)):
        for_16_keys = (executed(2048, page_size) - executed(1024, page_size)) / (1024 / 16)
        assert 0.98 * expected <= for_16_keys <= 1.02 * expected + more


@only_emulated
@pytest.mark.parametrize("tokens, steps", [(1024, 1), (4096, 2)])
def test_a_warp_executes_little_around_its_steps(tokens: int, steps: int) -> None:
    """A warp executes 460 instructions per 16 keys, and at most 1230 more, in which it also combines 32 partials in one
    round. The case is one sequence with 8 KV heads on an H200."""
    case = Case("short", (tokens,), (32, 8), dims=(128, 128), capacity=tokens, page_size=16)
    with device.emulated(90), launches.recorded() as found:
        run_kernel(case, make_arguments(case))
    (launched,) = found
    assert launched.grid[0] == 8 * tokens // (steps * 64)
    of_a_warp = sum(row.warps for row in launched.report.rows) / (4 * launched.grid[0])
    assert of_a_warp <= steps * 460 + 1230


@only_emulated
def test_a_window_leaves_the_other_keys_alone() -> None:
    case = Case("window", (3000,), (4, 1), dims=(64, 64), capacity=4096, window=(100, -1))
    with launches.recorded() as found:
        run_kernel(case, make_arguments(case))
    copies = [row for row in found[0].report.rows if row.opcode.startswith("cp.async.c")]
    assert sum(row.global_bytes for row in copies) == 101 * 2 * 64 * 2


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead"),
    [
        ("cp.async.wait_group 3;", "cp.async.wait_group 4;"),
        ("bar.sync 0;", ""),
        ("atom.acq_rel.gpu", "atom.relaxed.gpu"),
    ],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str) -> None:
    case = Case("fault", (300, 290), dims=(128, 128), capacity=320)
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        run_kernel(case, make_arguments(case), uninitialised=False)
    assert caught.value.kind == "race"
    check(case)


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_dtype
@each_cache
def test_the_public_function_chooses_it(dtype: torch.dtype, int8: bool) -> None:
    case = Case("public", dims=(72, 64), dtype=dtype, int8=int8, new=1)
    arguments = {name: value for name, value in make_arguments(case).items() if value is not None}
    name = f"{KERNEL}<128, {str(dtype).removeprefix('torch.')}{', int8' if int8 else ''}>"
    explained = fastattn.explain(fastattn.attention_with_kv_cache, **arguments)
    assert (explained.backend, explained.kernel) == ("cuda", name)
    assert explained.tile == {"block_m": 16, "block_n": 128 if int8 else 64, "num_warps": 4}
    with fastattn.record() as calls, checked():
        out = fastattn.attention_with_kv_cache(**arguments)
    assert calls == [("decode", "cuda", name)]
    assert isinstance(out, Tensor) and out.isfinite().all()


@pytest.mark.parametrize(
    "case",
    [
        Case("opcheck", lengths=(3, 70), new=2, queries=2, rotary_dim=16, sinks=True, splits=2),
        Case("opcheck-paged-int8", lengths=(20, 9), new=1, page_size=16, capacity=32, alibi="heads", int8=True),
    ],
    ids=str,
)
def test_opcheck(case: Case) -> None:
    with checked():
        torch.library.opcheck(torch.ops.fastattn.attention_decode.default, (), op_arguments(case, make_arguments(case)))


def changed(**changes: Any) -> dict[str, Any]:
    case = Case("bad", new=1, page_size=0 if "k_scale" in changes else 16, capacity=160)
    return {**op_arguments(case, make_arguments(case)), **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


BAD = {
    "rank": (lambda: changed(query=zeros(4, 1, 32)), "query must have 4 dimensions, got shape [4, 1, 32]"),
    "head dim": (
        lambda: changed(query=zeros(3, 4, 1, 24)),
        "k_cache must have shape [33, 2, 16, 24], got [33, 2, 16, 32]",
    ),
    "head counts": (
        lambda: changed(query=zeros(3, 3, 1, 32)),
        "query must have a multiple of the heads of k_cache (dim 1 of both), got 3 and 2",
    ),
    "lengths": (
        lambda: changed(cache_seqlens=zeros(3, dtype=torch.int64)),
        "cache_seqlens must be int32, got int64",
    ),
    "table": (
        lambda: changed(block_table=zeros(2, 10, dtype=torch.int32)),
        "block_table must have shape [3, 10], got [2, 10]",
    ),
    "one of the new": (lambda: changed(v_new=None), "k_new and v_new must both be given, or neither"),
    "new": (lambda: changed(k_new=zeros(3, 2, 1, 40)), "k_new must have shape [3, 2, 1, 32], got [3, 2, 1, 40]"),
    "scales": (lambda: changed(k_scale=zeros(3, 2, 160)), "k_scale must be None, because the native kernel does not"),
    "angles": (
        lambda: changed(rotary_cos=zeros(9, 20), rotary_sin=zeros(9, 20)),
        "rotary_cos must have at most as many columns as half of query's head dim, 16, got 20",
    ),
    "strides": (
        lambda: changed(k_cache=zeros(33, 2, 16, 33)[..., :32]),
        "k_cache is written in place: its last dim must be contiguous",
    ),
    "capacity": (
        lambda: changed(block_table=zeros(3, 1, dtype=torch.int32).expand(3, 2**26)),
        "k_cache must hold fewer than 2^30 tokens of a sequence, got 1073741824",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_the_op(name: str) -> None:
    arguments, words = BAD[name]
    with pytest.raises(RuntimeError) as caught:
        torch.ops.fastattn.attention_decode(**arguments())
    assert f"fastattn.attention_decode: {words}" in str(caught.value)
