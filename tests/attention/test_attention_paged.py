"""Compares attention_varlen over paged keys and values with the oracle, and tests contents of block tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from attention_cases import check_closely, offsets
from cuda_kernels import FAMILY, MARKS, checked, each_dtype, only_emulated
from fastattn import reference
from fastattn.reference.pages import gather_pages
from kernel_device import DEVICE
from oracle import check_against_oracle
from paged_cases import CAUSAL, HUGE, Case, make

pytestmark = MARKS
each_backend = pytest.mark.parametrize("backend", ["cuda", "triton"])


def run(arguments: dict[str, Any], backend: str) -> tuple[Tensor, Tensor]:
    with fastattn.use_backend(backend), fastattn.record() as calls, checked():
        out, lse = fastattn.attention_varlen(**arguments, return_lse=True)
    assert [call.backend for call in calls] == [backend]
    return out, lse


def check(arguments: dict[str, Any], backend: str) -> tuple[Tensor, Tensor]:
    out, lse = run(arguments, backend)
    dtype = arguments["query"].dtype
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    expected, expected_lse = reference.attention_varlen(**exact)
    composite, composite_lse = reference.attention_varlen(**arguments, compute_dtype=dtype)
    check_against_oracle("out", out, expected, composite)
    check_against_oracle("lse", lse, expected_lse, composite_lse)
    check_closely("lse", lse, expected_lse)
    return out, lse


CASES = [
    *(Case(page_size=size) for size in (1, 2, 16, 48, 128)),
    Case(dims=(128, 128), page_size=2, dtype=torch.bfloat16, lengths=((130, 3), (150, 70))),
    Case(dims=(72, 72), page_size=48, options=()),
    Case(dims=(256, 256), lengths=((9, 20), (70, 33)), dtype=torch.bfloat16),
    Case(dims=(192, 64), lengths=((20,), (70,))),
    Case(dims=(32, 64), heads=(6, 2), page_size=64, options=(("window", (20, 3)),)),
    Case(heads=(3, 3), shared_pages=2, lengths=((9, 30, 12), (60, 75, 33))),
    Case(lengths=((60, 141), (20, 70)), options=(("window", CAUSAL), ("softcap", 3.0))),  # with rows without a key
    Case(alibi=True, sinks=True, options=(("window", (50, -1)), ("dropout_p", 0.3), ("scale", -0.2))),
    Case(alibi=True, sinks=True, dtype=torch.bfloat16, options=(("softcap", 4.0), ("dropout_p", 0.2))),
]


@each_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_meets_the_oracle(case: Case, backend: str) -> None:
    check(make(case), backend)


@each_dtype
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_instance(head_dim: int, dtype: torch.dtype) -> None:
    check(make(Case(dims=(head_dim, head_dim), dtype=dtype, lengths=((20, 3), (70, 41)), heads=(2, 1))), "cuda")


def test_pytorch_gathers() -> None:
    """The reference gives the same result for pages as for their rows, packed."""
    arguments = make(Case(page_size=48))
    lengths = arguments["cu_seqlens_k"].diff().tolist()
    packed = dict(arguments, block_table=None, cu_seqlens_k=offsets(tuple(lengths)))
    for name in ("key", "value"):
        rows = gather_pages(arguments[name], arguments["block_table"].clamp(0, len(arguments[name]) - 1))
        packed[name] = torch.cat([rows[b, :, :length] for b, length in enumerate(lengths)], dim=1).transpose(0, 1)
    expected = reference.attention_varlen(**packed)
    with fastattn.use_backend("torch"):
        got = fastattn.attention_varlen(**arguments, return_lse=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@each_backend
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_pages_out_of_range_are_absent(page_size: int, backend: str) -> None:
    """Their keys are neither read nor counted, in full and in masked tiles; other keys keep their positions."""
    arguments = make(Case(page_size=page_size, lengths=((70, 20, 9), (200, 96, 48)), alibi=True))
    table = arguments["block_table"]
    table[0, 0], table[0, 100 // page_size], table[1, 32 // page_size] = HUGE, -1, arguments["key"].shape[0]
    table[2] = -5
    out, lse = check(arguments, backend)
    assert bool((out[90:] == 0).all()) and bool((lse[:, 90:] == -torch.inf).all())


@each_backend
def test_lengths_and_tables_in_device_memory_are_not_trusted(backend: str) -> None:
    arguments = make(Case(lengths=((20, 13, 7, 5), (50, 30, 8, 20))))
    for broken in ([0, HUGE, -HUGE - 1, HUGE, 2], [5, 5, -9, 100, 20]):
        arguments["cu_seqlens_k"] = torch.tensor(broken, dtype=torch.int32, device=DEVICE)
        arguments["max_seqlen_k"] = HUGE
        arguments["key"], arguments["value"] = arguments["key"].nan_to_num(), arguments["value"].nan_to_num()
        check(arguments, backend)


@each_backend
def test_few_pages(backend: str) -> None:
    """Tests a pool without pages, a table without columns, and bounds below the lengths."""
    arguments = make(Case())
    short = check(arguments | {"max_seqlen_k": 30, "max_seqlen_q": 9}, backend)
    assert not bool(short[0].isnan().any())
    empty = {name: arguments[name][:0] for name in ("key", "value")}
    for changed in (empty, {"block_table": arguments["block_table"][:, :0]}):
        out, lse = run(arguments | changed, backend)
        assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


@each_backend
def test_views_are_read_where_they_lie(backend: str) -> None:
    """Pages are [num_pages, page_size, Hkv, D] in memory, in a larger pool; the table has gaps."""
    arguments = make(Case(dims=(40, 24)))
    expected = run(arguments, backend)
    views = dict(arguments)
    for name in ("key", "value"):
        pages, kv_heads, rows, dim = arguments[name].shape
        larger = arguments[name].new_full((pages, rows + 3, kv_heads + 1, dim + 8), torch.nan)
        views[name] = larger.transpose(1, 2)[:, :kv_heads, :rows, :dim]
        views[name].copy_(arguments[name])
    table = arguments["block_table"]
    views["block_table"] = torch.stack([table, torch.full_like(table, HUGE)], -1).flatten(1)[:, ::2]
    for got, want in zip(run(views, backend), expected, strict=True):
        assert torch.equal(got, want)


@each_backend
@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_keys_that_are_masked_have_no_influence(spoiled: float, backend: str) -> None:
    arguments = make(Case(lengths=((60,), (120,)), page_size=16))
    clean = run(arguments, backend)
    page = int(arguments["block_table"][0, 100 // 16])
    arguments["key"][page, :, 100 % 16], arguments["value"][page, :, 100 % 16] = spoiled, spoiled
    out, lse = run(arguments, backend)
    sees = torch.arange(60, device=DEVICE) + 60 >= 100
    assert torch.equal(out[~sees], clean[0][~sees]) and torch.equal(lse[:, ~sees], clean[1][:, ~sees])
    if spoiled != spoiled:
        assert bool(out[sees].isnan().all())


@only_emulated
def test_order_of_warps_and_copies_has_no_influence() -> None:
    arguments = make(Case(dims=(128, 64), page_size=2, lengths=((140, 20), (150, 90))))
    arguments["block_table"][1, 3] = -1
    first = run(arguments, "cuda")
    with checked(seed=1):
        again = torch.ops.fastattn.attention_forward(*op_arguments(arguments))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def op_arguments(arguments: dict[str, Any]) -> tuple[Any, ...]:
    a = arguments
    tensors = (a["query"], a["key"], a["value"], None, None, None, None, a["cu_seqlens_q"], a["cu_seqlens_k"])
    scale = a["query"].shape[-1] ** -0.5
    return *tensors, a["max_seqlen_q"], a["max_seqlen_k"], scale, *a["window"], None, 0, 0, 0.0, 0.0, a["block_table"]


@only_emulated
@pytest.mark.parametrize("page_size", [1, 128])
def test_copies_are_coalesced_and_the_table_is_read_once_for_keys_and_values(page_size: int) -> None:
    """Wherever a row's page is, copies touch only the sectors of their own bytes."""
    from emulator import launches

    case = Case(page_size=page_size, lengths=((128,), (256,)), heads=(1, 1), dims=(128, 128), options=())
    with launches.recorded() as found:
        run(make(case), "cuda")
    (launched,) = found
    assert launched.report.bank_conflicts == 0
    copies = [row for row in launched.report.rows if row.opcode.startswith("cp.async.cg")]
    copied = sum(row.global_bytes for row in copies)
    assert copied == (128 + 2 * 256) * 128 * 2 == 32 * sum(row.global_sectors for row in copies)
    table = [row for row in launched.report.rows if row.opcode.startswith("ld.global.nc")]
    assert sum(row.global_bytes for row in table) == 256 * 4 * 8  # by the eight threads that copy a key's row


@each_dtype
def test_explain_and_record_name_the_kernel(dtype: torch.dtype) -> None:
    arguments = make(Case(dims=(72, 72), dtype=dtype))
    number = str(dtype).removeprefix("torch.")
    name = f"attention_forward_sm90<96, {number}>"
    if FAMILY == 80:
        name = f"attention_forward_options_sm80<96, {number}, paged>"
    explained = fastattn.explain(fastattn.attention_varlen, **arguments)
    assert (explained.backend, explained.kernel, explained.copied) == ("cuda", name, {})
    with fastattn.record() as calls, checked():
        fastattn.attention_varlen(**arguments)
    assert calls == [("attention", "cuda", name)]


def test_gradients_over_pages_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    arguments = make(Case(lengths=((9, 4), (20, 12)), shared_pages=1, dims=(16, 16), dtype=torch.bfloat16))
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].double().nan_to_num().to(torch.bfloat16).requires_grad_()
    explained = fastattn.explain(fastattn.attention_varlen, **arguments)
    assert explained.backend == "torch"
    assert "gradients over paged keys and values" in explained.rejected["cuda"]
    out = fastattn.attention_varlen(**arguments)
    assert isinstance(out, Tensor)
    leaves = [arguments[name] for name in ("query", "key", "value")]
    for gradient, leaf in zip(torch.autograd.grad(out.float().sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape and bool(gradient.isfinite().all())
    unused = torch.ones(arguments["key"].shape[0], dtype=torch.bool)
    table = arguments["block_table"]
    unused[table[(table >= 0) & (table < len(unused))].long().cpu()] = False
    out = fastattn.attention_varlen(**arguments)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), leaves[2:])
    assert bool((gradient[unused.to(DEVICE)] == 0).all()) and bool(gradient.any())


@each_backend
def test_vmap_maps_queries_and_pages(backend: str) -> None:
    arguments = make(Case(lengths=((9, 4), (20, 12)), dims=(16, 16)))
    queries = torch.stack([arguments["query"], -arguments["query"]])

    def attend(query: Tensor, key: Tensor) -> Any:
        return fastattn.attention_varlen(**(arguments | {"query": query, "key": key}))

    with fastattn.use_backend(backend), checked():
        got = torch.func.vmap(attend, in_dims=(0, None))(queries, arguments["key"])
        both = torch.func.vmap(attend)(queries, torch.stack([arguments["key"], 2 * arguments["key"]]))
        want = [attend(queries[0], arguments["key"]), attend(queries[1], arguments["key"])]
        doubled = attend(queries[1], 2 * arguments["key"])
    torch.testing.assert_close(got, torch.stack(want))
    torch.testing.assert_close(both, torch.stack([want[0], doubled]))
    with fastattn.use_backend(backend), pytest.raises(NotImplementedError, match="block_table"):
        tables = torch.stack([arguments["block_table"]] * 2)
        torch.func.vmap(lambda table: fastattn.attention_varlen(**(arguments | {"block_table": table})))(tables)


@each_backend
def test_compiles_without_graph_breaks(backend: str) -> None:
    arguments = make(Case(lengths=((9, 4), (20, 12)), dims=(16, 16)))

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Any:
        return fastattn.attention_varlen(
            **(arguments | {"query": query, "key": key, "value": value, "block_table": table}), return_lse=True
        )

    inputs = [arguments[name] for name in ("query", "key", "value", "block_table")]
    with fastattn.use_backend(backend), checked():
        expected = attend(*inputs)
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.fastattn.attention_forward.default,
        op_arguments(make(Case(dims=(16, 16)))),
        test_utils="test_faketensor",
    )


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a table of another batch": (lambda a: {"block_table": a["block_table"][:2]}, r"block_table: .* 5 .*got \[2, 9\]"),
    "a table of int64": (lambda a: {"block_table": a["block_table"].long()}, r"block_table: .*int32"),
    "a table of one dimension": (lambda a: {"block_table": a["block_table"][0]}, r"block_table: .*\[B, max_pages\]"),
    "no table": (lambda a: {"block_table": [1]}, "block_table"),
    "packed keys": (lambda a: {"key": a["key"][:, 0]}, r"key: .*\[num_pages, Hkv, page_size, D\]"),
    "int8 pages": (
        lambda a: {n: a[n].nan_to_num().to(torch.int8) for n in ("key", "value")},
        "attention_with_kv_cache",
    ),
    "values of other pages": (lambda a: {"value": a["value"][1:]}, "value: "),
    "pages of another dtype": (lambda a: {"key": a["key"].float()}, "key: .*float16"),
    "misaligned pages": (lambda a: {"key": a["key"].repeat(1, 1, 1, 2)[..., 1:65]}, "key: .*never copied"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    change, message = BAD[name]
    arguments = make(Case())
    with pytest.raises((fastattn.InputError, TypeError), match=message):
        fastattn.attention_varlen(**(arguments | change(arguments)))


def test_pages_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
    explained = fastattn.explain(fastattn.attention_varlen, **make(Case(dims=(20, 64))))
    assert explained.backend == "torch"
    assert "fastattn never pads a cache: create it with head dim 24" in explained.rejected["cuda"]


def test_checks_of_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    arguments = make(Case())
    with checked():
        fastattn.attention_varlen(**arguments)
    table = arguments["block_table"].clone()
    table[2, 3] = -1
    with pytest.raises(fastattn.InputError, match="-1 as page 3 of sequence 2"):
        fastattn.attention_varlen(**(arguments | {"block_table": table}))
    with pytest.raises(fastattn.InputError, match="pages for the 101 keys"):
        fastattn.attention_varlen(**(arguments | {"block_table": arguments["block_table"][:, :4]}))
    with pytest.raises(fastattn.InputError, match="max_seqlen_k"):
        fastattn.attention_varlen(**(arguments | {"max_seqlen_k": 100}))


def test_each_case_has_keys_to_look_up() -> None:
    """Pages are shuffled, so a kernel that ignores the table cannot pass by accident."""
    tables = [make(replace(case, lengths=((1,), (100,))))["block_table"] for case in CASES]
    assert any(table[0, : len(table)].tolist() != list(range(len(table))) for table in tables)
