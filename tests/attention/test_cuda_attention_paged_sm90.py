"""Tests the Hopper forward kernels over paged keys and values against the oracle: each way in which the producer finds
pages, contents of block tables, and rows that must not be read.

They run on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import test_attention_paged as paged
from cuda_kernels import EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from paged_cases import CAUSAL, HUGE, Case, make

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = HOPPER_MARKS

SOURCES = Path(__file__).parents[2] / "csrc" / "attention"
PLAIN, OPTIONS = "attention_forward_sm90", "attention_forward_options_sm90"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# A page holds whole tiles of some head dims (128, 256), fractions of a tile (8 to 96), or rows to gather (others).
PAGE_SIZES = (1, 5, 8, 16, 24, 64, 96, 128, 256)
# One page size of each kind.
SOME_SIZES = (5, 16, 128)
each_kind = pytest.mark.parametrize("page_size", SOME_SIZES)
PLAIN_OPTIONS = {"window", "scale"}


def kernel_of(case: Case) -> str:
    return OPTIONS if case.alibi or dict(case.options).keys() - PLAIN_OPTIONS else PLAIN


def check(arguments: dict[str, Any], kernel: str) -> tuple[Tensor, Tensor]:
    """Compares a call with the oracle, and checks that ``kernel`` ran."""
    with fastattn.record() as calls:
        result = paged.check(arguments, "cuda")
    assert [call.kernel.partition("<")[0] for call in calls] == [kernel]
    return result


def check_case(case: Case) -> tuple[Tensor, Tensor]:
    return check(make(case), kernel_of(case))


def run(arguments: dict[str, Any], kernel: str = PLAIN, **launching: Any) -> tuple[Tensor, Tensor]:
    with fastattn.use_backend("cuda"), fastattn.record() as calls, checked(**launching):
        out, lse = fastattn.attention_varlen(**arguments, return_lse=True)
    assert [call.kernel.partition("<")[0] for call in calls] == [kernel]
    return out, lse


def whole(case: Case) -> Case:
    """Returns the case with one page per sequence, as a prompt over a contiguous cache has."""
    return replace(case, page_size=max(case.lengths[1]) + 6)


def only_first_page(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"block_table": arguments["block_table"][:, :1].contiguous()}


# --- Against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", paged.CASES, ids=str)
def test_what_the_kernel_for_sm_80_computes(case: Case) -> None:
    check_case(case)


# Several tiles of rows and of keys for each head dim, full and masked.
LARGE = Case(lengths=((200, 33, 1), (370, 97, 260)))


def in_turn(page_sizes: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    """Pairs each page size with two of the head dims."""
    turns = [(size, HEAD_DIMS[(index + far) % 6]) for index, size in enumerate(page_sizes) for far in (0, 3)]
    assert {head_dims for _, head_dims in turns} == set(HEAD_DIMS)
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("page_size, head_dims", in_turn(PAGE_SIZES), ids=str)
def test_page_sizes(page_size: int, head_dims: tuple[int, int]) -> None:
    dtype = torch.float16 if page_size % 3 else torch.bfloat16
    options = () if page_size in (5, 16, 96) else (("window", CAUSAL),)
    check_case(replace(LARGE, page_size=page_size, dims=head_dims, dtype=dtype, options=options))


@pytest.mark.slow
@pytest.mark.parametrize("page_size, head_dims", in_turn((96, 24, 8, 1)), ids=str)
def test_page_sizes_with_options(page_size: int, head_dims: tuple[int, int]) -> None:
    chosen: tuple[tuple[str, Any], ...] = (("window", (150, 20)), ("softcap", 3.0))
    if page_size == 8:
        chosen = (("window", CAUSAL), ("dropout_p", 0.3), ("scale", -0.2))
    dtype = torch.bfloat16 if page_size == 24 else torch.float16
    case = replace(LARGE, page_size=page_size, dims=head_dims, options=chosen, dtype=dtype)
    check_case(replace(case, alibi=page_size == 96, sinks=page_size == 1))


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_one_page_holds_a_sequence(head_dims: tuple[int, int]) -> None:
    is_full = HEAD_DIMS.index(head_dims) % 2 == 0
    window, dtype = ((-1, -1), torch.float16) if is_full else (CAUSAL, torch.bfloat16)
    case = whole(replace(LARGE, dims=head_dims, options=(("window", window),), dtype=dtype))
    check(only_first_page(make(case)), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sinks": True}, {"options": (("window", (70, 9)),)}], ids=str)
@each_kind
def test_sinks_and_windows(page_size: int, options: dict[str, Any]) -> None:
    check_case(replace(LARGE, page_size=page_size, dims=(128, 64), **options))


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [(8, 24), (72, 96), (16, 128), (200, 256)], ids=str)
@each_kind
def test_head_dims_below_the_kernels_own(page_size: int, head_dims: tuple[int, int]) -> None:
    check_case(Case(page_size=page_size, dims=head_dims, lengths=((70, 5), (180, 60))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page_size, heads", [*itertools.product((5, 16), [(8, 1), (8, 2), (6, 2), (5, 5)]), (128, (8, 1))], ids=str
)
def test_query_heads_in_the_rows_of_a_tile(page_size: int, heads: tuple[int, int]) -> None:
    for lengths in (((1, 1, 1), (300, 5, 130)), ((17, 0, 40), (300, 0, 90))):
        check_case(Case(page_size=page_size, heads=heads, dims=(128, 128), lengths=lengths, sinks=True))


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize(
    ("page_size", "cluster", "head_dims"),
    [
        *((page_size, 2, (128, 128)) for page_size in (8, 256)),
        (8, 2, (192, 192)),
        *((page_size, 2, (256, 256)) for page_size in (16, 128)),
        *((5, 1, (head_dim, head_dim)) for head_dim in (128, 256)),
    ],
    ids=str,
)
def test_two_ctas_share_tiles_by_tma(page_size: int, cluster: int, head_dims: tuple[int, int]) -> None:
    """CTAs of two heads with the same keys share them, as do CTAs of two row tiles. Gathered rows are not shared."""
    case = Case(page_size=page_size, dims=head_dims, lengths=((256, 140), (330, 290)), options=())
    for heads in ((2, 1), (1, 1)):
        arguments = make(replace(case, heads=heads))
        with device.emulated(90, num_sms=4), launches.recorded() as found:
            if heads == (1, 1):
                arguments["block_table"][1, 100 // page_size] = -1
            check(arguments, PLAIN)
        for launched in found:
            assert (launched.report.waits.get("cluster barrier", 0) > 0) == (cluster == 2)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("num_sms", [1, 132])
@each_kind
def test_any_number_of_sms(page_size: int, num_sms: int) -> None:
    """Rings continue from one work tile to the next."""
    with device.emulated(90, num_sms=num_sms):
        for head_dim in (64, 256) if page_size == 16 else (64,):
            check_case(replace(LARGE, page_size=page_size, dims=(head_dim, head_dim), heads=(3, 3)))


# --- Contents of block tables and of rows that must not be read -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "head_dims", "kernel"),
    [
        *((page_size, (64, 64), (PLAIN, OPTIONS)[turn % 2]) for turn, page_size in enumerate((1, 16, 48, 128))),
        *((page_size, (64, 64), (OPTIONS, PLAIN)[turn % 2]) for turn, page_size in enumerate((5, 128))),
        *((16, (128, 128), kernel) for kernel in (PLAIN, OPTIONS)),
        (48, (192, 128), PLAIN),
        (128, (256, 256), OPTIONS),
    ],
    ids=str,
)
def test_pages_out_of_range_are_absent(page_size: int, head_dims: tuple[int, int], kernel: str) -> None:
    """Their keys are neither read nor counted, in full and in masked tiles; other keys keep their positions."""
    case = Case(page_size=page_size, lengths=((210, 20, 9), (500, 96, 48)), dims=head_dims)
    arguments = make(replace(case, alibi=kernel == OPTIONS, sinks=False))
    for window in ((-1, -1), CAUSAL):
        broken = arguments["block_table"].clone()
        broken[0, 0], broken[0, 300 // page_size], broken[1, 32 // page_size] = HUGE, -1, arguments["key"].shape[0]
        broken[2] = -5
        out, lse = check(arguments | {"block_table": broken, "window": window}, kernel)
        assert bool((out[230:] == 0).all()) and bool((lse[:, 230:] == -torch.inf).all())


def test_one_page_that_does_not_exist() -> None:
    case = whole(LARGE)
    arguments = only_first_page(make(case))
    arguments["block_table"][1] = len(arguments["key"])
    out, _ = check(arguments, PLAIN)
    assert bool((out[200:233] == 0).all())


def test_lengths_and_tables_in_device_memory_are_not_trusted() -> None:
    arguments = make(Case(lengths=((20, 13, 7, 5), (50, 30, 8, 20))))
    for broken in ([0, HUGE, -HUGE - 1, HUGE, 2], [5, 5, -9, 100, 20]):
        arguments["cu_seqlens_k"] = torch.tensor(broken, dtype=torch.int32, device=DEVICE)
        arguments["max_seqlen_k"] = HUGE
        arguments["key"], arguments["value"] = arguments["key"].nan_to_num(), arguments["value"].nan_to_num()
        check(arguments, PLAIN)


def test_few_pages() -> None:
    """Tests a pool without pages, a table without columns, pages without rows, and bounds below the lengths."""
    arguments = make(Case())
    short = check(arguments | {"max_seqlen_k": 30, "max_seqlen_q": 9}, PLAIN)
    assert not bool(short[0].isnan().any())
    empty = {name: arguments[name][:0] for name in ("key", "value")}
    no_rows = {name: arguments[name][:, :, :0] for name in ("key", "value")}
    for changed in (empty, no_rows, {"block_table": arguments["block_table"][:, :0]}):
        out, lse = run(arguments | changed)
        assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("spoiled, kernel", [(torch.nan, PLAIN), (torch.inf, OPTIONS)])
def test_keys_that_are_masked_have_no_influence(spoiled: float, page_size: int, kernel: str) -> None:
    case = Case(lengths=((200,), (300,)), page_size=page_size, dims=(128, 128), alibi=kernel == OPTIONS)
    arguments = make(case)
    clean = run(arguments, kernel)
    page = int(arguments["block_table"][0, 170 // page_size])
    arguments["key"][page, :, 170 % page_size] = arguments["value"][page, :, 170 % page_size] = spoiled
    out, lse = run(arguments, kernel)
    sees = torch.arange(200, device=DEVICE) + 100 >= 170
    assert torch.equal(out[~sees], clean[0][~sees]) and torch.equal(lse[:, ~sees], clean[1][:, ~sees])
    if spoiled != spoiled:
        assert bool(out[sees].isnan().all())


@each_kind
@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(spoiled: float, page_size: int) -> None:
    """The next page is absent. All other numbers keep their bits."""
    arguments = make(Case(lengths=((200,), (300,)), page_size=page_size, dims=(64, 64)))
    arguments["window"] = CAUSAL
    if page_size < 100:
        arguments["block_table"][0, 200 // page_size] = -1
    clean, clean_lse = run(arguments, PLAIN)
    page = int(arguments["block_table"][0, 170 // page_size])
    arguments["value"][page, 0, 170 % page_size, 5] = spoiled
    out, lse = run(arguments, PLAIN)
    sees = torch.arange(200, device=DEVICE) + 100 >= 170
    group = out.shape[1] // arguments["value"].shape[1]
    spoilt = out[sees, :group, 5]
    assert bool(spoilt.isnan().all() if spoiled != spoiled else (spoilt == spoiled).all())
    out[sees, :group, 5] = clean[sees, :group, 5]
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


@pytest.mark.slow
@each_kind
def test_views_are_read_where_they_lie(page_size: int) -> None:
    arguments = make(Case(page_size=page_size, dims=(128, 128)))
    expected = run(arguments)
    key, value = arguments["key"], arguments["value"]
    pages, heads, rows, dim = key.shape
    beside = torch.cat([key, value], dim=-1)
    rows_first = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (key, value)]
    larger = key.new_full((2, pages, rows + 3, heads + 1, dim + 8), torch.nan).transpose(2, 3)
    larger = larger[:, :, :heads, :rows, :dim]
    layouts = [(beside[..., :dim], beside[..., dim:]), rows_first, (larger[0].copy_(key), larger[1].copy_(value))]
    for key_view, value_view in layouts:
        found = run(arguments | {"key": key_view, "value": value_view})
        assert all(map(torch.equal, found, expected))


def test_pages_that_are_the_same_memory() -> None:
    """Pages have a stride of 0 in the tensor map; absent pages are absent nevertheless."""
    for page_size in SOME_SIZES:
        arguments = make(Case(page_size=page_size, lengths=((20, 9), (130, 60))))
        for name in ("key", "value"):
            pages = arguments[name]
            arguments[name] = torch.randn_like(pages[:1]).expand(pages.shape)
        arguments["block_table"][0, 30 // page_size] = -1
        check(arguments, PLAIN)


# --- Rings and roles --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("page_size, head_dim", [(1, 64), (8, 256), (16, 128), (128, 64)])
def test_order_of_warps_and_copies_has_no_influence(page_size: int, head_dim: int) -> None:
    case = Case(dims=(head_dim, head_dim), page_size=page_size, lengths=((140, 20), (290, 90)))
    arguments = make(case)
    arguments["block_table"][1, 3 if page_size < 30 else 0] = -1
    first, again = run(arguments, seed=100), run(arguments, seed=1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead", "kinds"),
    [
        (
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64",
            "mbarrier.arrive.shared::cta.b64 _,",
            {"race", "uninitialised"},
        ),
        ("fence.proxy.async.shared::cta;", "", {"proxy"}),
    ],
    ids=["copies are not waited for", "no fence between the proxies"],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    arguments = make(Case(page_size=5, lengths=((20,), (130,)), options=()))
    arguments["key"], arguments["value"] = arguments["key"].nan_to_num(), arguments["value"].nan_to_num()
    with cuda_runtime.replaced(instruction, instead, "attention_forward"), pytest.raises(EmulatorError) as caught:
        run(arguments)
    assert caught.value.kind in kinds


@only_emulated
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("source", "comment"),
    [
        ("forward_producer_sm90.cuh", "waits until all lanes see the index"),
        ("forward_producer_sm90.cuh", "waits until every lane has read the work tile"),
        ("forward_consumer_sm90.cuh", "waits until every lane has read the work tile"),
    ],
)
def test_a_missing_syncwarp_is_found(source: str, comment: str, seed: int) -> None:
    """Removes a __syncwarp between all lanes and the lane that fetches work or arrives at a barrier for its warp."""
    lines = (SOURCES / source).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "__syncwarp();" in text and comment in text)
    place = f" {line} {lines[line - 1].index('__syncwarp') + 1}\n"
    arguments = make(Case(page_size=5, lengths=((420, 120, 300), (430, 150, 300)), options=()))
    with (
        device.emulated(90, num_sms=2),
        cuda_runtime.replaced(f"{place}bar.warp.sync -1;", place, "attention_forward"),
        pytest.raises(EmulatorError) as caught,
    ):
        run(arguments, seed=seed)
    assert caught.value.kind == "race"


@only_emulated
def test_the_table_is_read_within_a_sequence_alone() -> None:
    """A tile may reach beyond the sequence's keys, where entries may lie outside of the table."""
    for page_size in SOME_SIZES:
        arguments = make(Case(page_size=page_size, lengths=((9,), (4 * page_size,)), options=()))
        exact = arguments["block_table"][:, :4].clone()
        check(arguments | {"block_table": exact}, PLAIN)


@only_emulated
@pytest.mark.parametrize("head_dim", [96, 128])  # rows in shared memory have 64 and 128 bytes
@pytest.mark.parametrize(("page_size", "gathers"), [(1, True), (5, True), (12, True), (8, False), (128, False)])
def test_which_pages_are_copied_by_tma(page_size: int, gathers: bool, head_dim: int) -> None:
    arguments = make(Case(page_size=page_size, dims=(head_dim, head_dim), lengths=((64,), (256,)), options=()))
    with launches.recorded() as found:
        run(arguments)
    (launched,) = found
    opcodes = {row.opcode for row in launched.report.rows}
    assert any(opcode.startswith("cp.async.cg") for opcode in opcodes) == gathers
    assert launched.report.bank_conflicts == 0 or not gathers


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_explain_and_record_name_the_kernel(softcap: float, dtype: torch.dtype) -> None:
    arguments = make(Case(dims=(72, 72), dtype=dtype)) | {"softcap": softcap}
    name = f"{OPTIONS if softcap else PLAIN}<96, {str(dtype).removeprefix('torch.')}>"
    explained = fastattn.explain(fastattn.attention_varlen, **arguments)
    assert (explained.backend, explained.kernel, explained.copied) == ("cuda", name, {})
    with fastattn.record() as calls, checked():
        fastattn.attention_varlen(**arguments)
    assert calls == [("attention", "cuda", name)]


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("page_size", SOME_SIZES)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("options", [(), (("softcap", 3.0),)], ids=["plain", "options"])
def test_ctas_share_keys_in_pages(options: tuple[tuple[str, Any], ...], dims: tuple[int, int], page_size: int) -> None:
    """There are few rows over many keys, so CTAs split the keys; then a page is missing in one split."""
    case = Case(lengths=((40, 3), (2000, 30)), page_size=page_size, dims=dims, options=options)
    arguments = make(case)
    check_with_parts(arguments, kernel_of(case))
    arguments["block_table"][0, 1000 // page_size] = -1
    check_with_parts(arguments, kernel_of(case))


def check_with_parts(arguments: dict[str, Any], kernel: str) -> None:
    with device.emulated(90, num_sms=7), launches.recorded() as found:
        check(arguments, kernel)
    assert sum(launched.report.opcodes.get("atom.acq_rel.gpu.global.add.u64", 0) for launched in found) > 0
