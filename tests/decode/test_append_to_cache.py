"""Tests ``append_to_cache`` of every backend, bit for bit; on a GPU, else on the emulator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import instances
from append_cases import CACHES, SCALES, Case, check_caches, expected, make_arguments
from cuda_kernels import DTYPES, EMULATED, HAS_KERNELS, NO_KERNELS, checked, only_emulated
from fastattn import native
from kernel_device import DEVICE

if EMULATED:
    from emulator import cuda_runtime, launches

pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

each_cache = pytest.mark.parametrize("int8", (False, True), ids=["16-bit", "int8"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
OPS = {"cuda": torch.ops.fastattn, "triton": torch.ops.fastattn_triton}
KERNELS = {
    "cuda": "decode_append_sm80<64, float16>",
    "triton": "decode_append.append_to_slots_kernel",
    "torch": "PyTorch",
}
pytest.importorskip("triton")


def check(arguments: dict[str, Any]) -> None:
    wanted = expected(arguments)
    assert fastattn.append_to_cache(**arguments) is None
    check_caches(arguments, wanted)


OUT_OF_RANGE = (-1, 80, -80, 2**31 - 1, -(2**31))


@pytest.mark.parametrize(
    "case",
    [
        Case("one-token", tokens=1),
        Case("one-head", kv_heads=1, tokens=33),
        Case("odd-heads", kv_heads=3, tokens=7),
        Case("int32-slots", slot_dtype=torch.int32, absent=OUT_OF_RANGE),
        Case("int64-slots", absent=(*OUT_OF_RANGE, 2**31, 2**32, 2**32 + 3, -(2**63), 2**63 - 1)),
        Case("all-absent", tokens=5, absent=OUT_OF_RANGE),
        Case("page-1", page_size=1, num_pages=50),
        Case("page-48", page_size=48, num_pages=3, absent=(144, -1)),
        Case("every-slot", tokens=80),
        Case("values-of-another-width", dims=(24, 64)),
        Case("narrow", dims=(8, 16)),
        Case("wide", dims=(256, 200), tokens=9),
    ],
    ids=str,
)
@each_cache
def test_tokens_go_to_their_slots(case: Case, int8: bool, backend: str) -> None:
    check(make_arguments(Case(**{**vars(case), "int8": int8})))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 72), (256, 256), (192, 136)], ids=str)
@each_dtype
@each_cache
def test_each_instance(dims: tuple[int, int], dtype: torch.dtype, int8: bool, backend: str) -> None:
    check(make_arguments(Case("dims", dims=dims, dtype=dtype, int8=int8, tokens=11, absent=(-1,), seed=3)))


@pytest.mark.parametrize("magnitude", (0.0, 1e-7, 300.0))
def test_int8_of_any_magnitude(magnitude: float, backend: str) -> None:
    """Zeros have the scale 1. So do numbers so small that the division underflows, which exist in bfloat16."""
    arguments = make_arguments(Case("magnitude", int8=True, dtype=torch.bfloat16, magnitude=magnitude))
    arguments["k_new"][0] = 1e-40
    check(arguments)
    if magnitude == 0:
        assert set(arguments["v_scale"].nan_to_num(1.0).unique().tolist()) == {1.0}


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_int8_of_what_is_not_finite_stays_visible(value: float, backend: str) -> None:
    """The head and token with such a value have a scale that is not finite (NaN from a kernel); no other has."""
    arguments = make_arguments(Case("not-finite", tokens=4, int8=True, page_size=4, num_pages=1))
    arguments["k_new"][1, 0, 5] = value
    fastattn.append_to_cache(**arguments)
    slot = int(arguments["slot_mapping"][1])
    is_spoiled = ~arguments["k_scale"].isfinite()
    assert bool(is_spoiled[0, 0, slot]) and int(is_spoiled.sum()) == 1
    assert bool(arguments["v_scale"].isfinite().all())


@each_cache
def test_empty_calls_change_nothing(int8: bool, backend: str) -> None:
    for case in (
        Case("no-tokens", tokens=0, int8=int8),
        Case("no-pages", tokens=3, num_pages=0, absent=(0, -1, 5), int8=int8),
        Case("no-heads", kv_heads=0, int8=int8),
    ):
        arguments = make_arguments(case) if case.num_pages else make_empty(case)
        check(arguments)


def make_empty(case: Case) -> dict[str, Any]:
    arguments = make_arguments(Case(**{**vars(case), "num_pages": 1}))
    return {name: value[:0] if name in (*CACHES, *SCALES) and value is not None else value
            for name, value in arguments.items()}  # fmt: skip


# --- Layouts ----------------------------------------------------------------------------------------------------------


def of_a_projection(arguments: dict[str, Any]) -> None:
    """Queries, keys and values of a token are in one row."""
    k, v = arguments["k_new"], arguments["v_new"]
    packed = torch.full((k.shape[0], 4 + 2 * k.shape[1], k.shape[2]), math.nan, dtype=k.dtype, device=DEVICE)
    heads = k.shape[1]
    arguments["k_new"], arguments["v_new"] = packed[:, 4 : 4 + heads], packed[:, 4 + heads :]
    arguments["k_new"].copy_(k)
    arguments["v_new"].copy_(v)


def of_any_alignment(arguments: dict[str, Any]) -> None:
    """These strides and offsets are unaligned: on a GPU, the tensors are copied first."""
    arguments["k_new"] = torch.cat([arguments["k_new"]] * 2, -1)[..., 3 : 3 + arguments["k_new"].shape[-1]]
    arguments["v_new"] = arguments["v_new"].transpose(0, 2).contiguous().transpose(0, 2)


def slots_in_a_column(arguments: dict[str, Any]) -> None:
    arguments["slot_mapping"] = torch.stack([arguments["slot_mapping"], arguments["slot_mapping"] * 0 + 7], 1)[:, 0]


def reversed_heads(arguments: dict[str, Any]) -> None:
    """Caches are [num_pages, page_size, Hkv, D] in memory."""
    for name in (*CACHES, *SCALES):
        if arguments[name] is not None:
            arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)


def interleaved(arguments: dict[str, Any]) -> None:
    """Key and value of a token and head are in one row."""
    kv = torch.cat([arguments["k_cache"], arguments["v_cache"]], -1)
    dim = arguments["k_cache"].shape[-1]
    arguments["k_cache"], arguments["v_cache"] = kv[..., :dim], kv[..., dim:]


def interleaved_with_heads_after_rows(arguments: dict[str, Any]) -> None:
    interleaved(arguments)
    dim = arguments["k_cache"].shape[-1]
    kv = torch.cat([arguments["k_cache"], arguments["v_cache"]], -1).transpose(1, 2).contiguous().transpose(1, 2)
    arguments["k_cache"], arguments["v_cache"] = kv[..., :dim], kv[..., dim:]


def keys_before_values(arguments: dict[str, Any]) -> None:
    """Caches are one tensor [2, num_pages, …]."""
    arguments["k_cache"], arguments["v_cache"] = torch.stack([arguments["k_cache"], arguments["v_cache"]]).unbind(0)


@pytest.mark.parametrize(
    "layout",
    [
        of_a_projection,
        of_any_alignment,
        slots_in_a_column,
        reversed_heads,
        interleaved,
        interleaved_with_heads_after_rows,
        keys_before_values,
    ],
)
@each_cache
def test_layouts(layout: Callable[[dict[str, Any]], None], int8: bool, backend: str) -> None:
    arguments = make_arguments(Case("layout", int8=int8, absent=(-1, 1000), page_size=8, num_pages=6))
    layout(arguments)
    check(arguments)


def test_the_pages_are_those_that_attention_reads(backend: str) -> None:
    """attention_with_kv_cache, which appends by lengths and a block table, writes the same bits to the same slots."""
    case = Case("append", tokens=6, int8=True, page_size=4, num_pages=9)
    by_slots, by_lengths = make_arguments(case), make_arguments(case)
    table = torch.tensor([[3, 8, 0], [1, 5, 6]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2, 7], dtype=torch.int32, device=DEVICE)
    position = lengths[:, None] + torch.arange(3, device=DEVICE)
    page = table.gather(1, (position // 4).long())
    by_slots["slot_mapping"] = (page.long() * 4 + position % 4).flatten()
    fastattn.append_to_cache(**by_slots)
    k_new, v_new = (by_slots[name].unflatten(0, (2, 3)).transpose(1, 2) for name in ("k_new", "v_new"))
    pages = {name: by_lengths[name] for name in (*CACHES, *SCALES)}
    fastattn.attention_with_kv_cache(
        torch.zeros_like(k_new[:, :, :1]), cache_seqlens=lengths, block_table=table, k_new=k_new, v_new=v_new, **pages
    )
    check_caches(by_slots, {name: by_lengths[name] for name in (*CACHES, *SCALES)})


# --- As PyTorch sees it -----------------------------------------------------------------------------------------------


def test_it_is_known_by_name(backend: str) -> None:
    arguments = make_arguments(Case("names"))
    explained = fastattn.explain(fastattn.append_to_cache, **arguments)
    assert (explained.backend, explained.kernel, explained.copied) == (backend, KERNELS[backend], {})
    assert bool(arguments["k_cache"].isnan().all())  # explain has not run the call
    arguments["k_new"] = arguments["k_new"].transpose(0, 2).contiguous().transpose(0, 2)
    copied = fastattn.explain(fastattn.append_to_cache, **arguments).copied
    assert list(copied) == ([] if backend == "torch" else ["k_new"])
    with fastattn.record() as calls:
        fastattn.append_to_cache(**arguments)
    assert calls == [("append", backend, KERNELS[backend])]


@each_cache
def test_compile_and_export(int8: bool, backend: str) -> None:
    def append(arguments: dict[str, Any]) -> Tensor:
        fastattn.append_to_cache(**arguments)
        return arguments["k_cache"].float().nan_to_num().sum()

    torch._dynamo.reset()
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9, 14):
        arguments = make_arguments(Case("compiled", tokens=tokens, int8=int8, absent=(-1,)))
        wanted = expected(arguments)
        total = compiled(arguments)
        check_caches(arguments, wanted)
        torch.testing.assert_close(total, arguments["k_cache"].float().nan_to_num().sum())


@pytest.mark.parametrize("backend", ["triton", "cuda"], indirect=True)
@each_cache
def test_opcheck(int8: bool, backend: str) -> None:
    arguments = make_arguments(Case("opcheck", int8=int8, absent=(-1,)))
    torch.library.opcheck(OPS[backend].append_to_cache.default, tuple(arguments.values()))


def test_the_schema_says_what_it_writes() -> None:
    for ops in OPS.values():
        arguments = ops.append_to_cache.default._schema.arguments
        written = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
        assert written == {*CACHES, *SCALES}


def test_autocast_casts_the_new_tokens(backend: str) -> None:
    arguments = make_arguments(Case("autocast", dtype=torch.bfloat16))
    wanted = expected(arguments)
    for name in ("k_new", "v_new"):
        arguments[name] = arguments[name].float()
    with torch.autocast(DEVICE, torch.bfloat16):
        fastattn.append_to_cache(**arguments)
    check_caches(arguments, wanted)


def test_sdpa_kernel_says_nothing_about_it() -> None:
    if not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), checked():
        assert fastattn.explain(fastattn.append_to_cache, **make_arguments(Case("sdpa"))).backend == "cuda"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@each_cache
def test_other_dtypes_go_to_pytorch(dtype: torch.dtype, int8: bool) -> None:
    with fastattn.use_backend("torch"):
        check(make_arguments(Case("dtype", dtype=dtype, int8=int8, dims=(7, 3), absent=(-1, 99))))


# --- Errors -----------------------------------------------------------------------------------------------------------


def spoiled(**changes: Any) -> dict[str, Any]:
    return {**make_arguments(Case("bad", int8=changes.pop("int8", False))), **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=options.pop("device", DEVICE), **options)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no tensor": (lambda: spoiled(k_new=3), TypeError, "k_new: expected a torch.Tensor, got int"),
    "no slots": (lambda: spoiled(slot_mapping=None), TypeError, "slot_mapping: expected a torch.Tensor"),
    "rank": (
        lambda: spoiled(k_new=zeros(1, 21, 2, 64)),
        ValueError,
        r"k_new: expected 3 dimensions \[tokens, Hkv, D\]",
    ),
    "tokens": (lambda: spoiled(v_new=zeros(20, 2, 64)), ValueError, r"v_new: expected shape \[tokens, Hkv, Dv\]"),
    "dtype": (lambda: spoiled(v_new=zeros(21, 2, 64).float()), ValueError, "v_new: expected torch.float16, got"),
    "heads": (
        lambda: spoiled(k_new=zeros(21, 3, 64), v_new=zeros(21, 3, 64)),
        ValueError,
        r"k_cache: expected shape \[num_pages, Hkv, page_size, D\] = \[5, 3, 16, 64\], got \[5, 2, 16, 64\]",
    ),
    "pages": (
        lambda: spoiled(v_cache=zeros(4, 2, 16, 64)),
        ValueError,
        r"v_cache: expected shape .* = \[5, 2, 16, 64\]",
    ),
    "cache dtype": (
        lambda: spoiled(k_cache=zeros(5, 2, 16, 64).float()),
        ValueError,
        "k_cache: expected torch.float16 like the query and new tokens, torch.int8",
    ),
    "slots": (
        lambda: spoiled(slot_mapping=zeros(20, dtype=torch.int64)),
        ValueError,
        r"slot_mapping: expected shape \[tokens\]",
    ),
    "slot dtype": (
        lambda: spoiled(slot_mapping=zeros(21, dtype=torch.int16)),
        ValueError,
        "slot_mapping: expected torch.int64 or torch.int32, got torch.int16",
    ),
    "slots as a list": (
        lambda: spoiled(slot_mapping=list(range(21))),
        TypeError,
        r"slot_mapping: .* got list; pass torch\.tensor\(slot_mapping, dtype=torch\.int64, device=k_new\.device\)",
    ),
    "device": (
        lambda: spoiled(slot_mapping=zeros(21, dtype=torch.int64, device="meta")),
        ValueError,
        "slot_mapping: expected a tensor on",
    ),
    "scales": (
        lambda: spoiled(k_scale=zeros(5, 2, 16).float()),
        ValueError,
        "k_scale: expected None with a cache of torch.float16",
    ),
    "no scales": (
        lambda: spoiled(int8=True, v_scale=None),
        ValueError,
        "v_scale: expected a float32 tensor .*, the scales of an int8 cache",
    ),
    "scale shape": (
        lambda: spoiled(int8=True, v_scale=zeros(5, 2, 17).float()),
        ValueError,
        "v_scale: expected shape of the cache",
    ),
    "gradient": (
        lambda: spoiled(k_new=zeros(21, 2, 64, requires_grad=True)),
        ValueError,
        "k_new: expected a tensor that needs no gradient",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, backend: str) -> None:
    make, kind, words = BAD[name]
    arguments = make()
    before = {each: arguments[each].clone() for each in CACHES}
    with pytest.raises(kind, match=words):
        fastattn.append_to_cache(**arguments)
    check_caches(arguments, before)


def test_a_cache_that_a_kernel_cannot_write_is_an_error(backend: str) -> None:
    arguments = spoiled(k_cache=zeros(5, 2, 16, 65)[..., :64])
    if backend == "torch":
        check(arguments)
        return
    with pytest.raises(fastattn.InputError, match=r"k_cache: expected a contiguous last dimension.*written in place"):
        fastattn.append_to_cache(**arguments)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([0, 80, 1], "slot_mapping: expected slots below 80, got 80 for token 1"),
        ([-1, 7, -1, 7], "slot_mapping: expected another slot for each token, got 7 for tokens 1 and 3"),
    ],
)
def test_device_checks_find_wrong_slots(slots: list[int], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make_arguments(Case("slots", tokens=len(slots)))
    arguments["slot_mapping"] = torch.tensor(slots, device=DEVICE)
    with fastattn.use_backend("torch"):
        fastattn.append_to_cache(**arguments)
        monkeypatch.setenv("FASTATTN_CHECK", "1")
        with pytest.raises(fastattn.InputError, match=words):
            fastattn.append_to_cache(**arguments)
        arguments["slot_mapping"] = torch.tensor([-1, 79, *[-1] * (len(slots) - 2)], device=DEVICE)
        fastattn.append_to_cache(**arguments)


@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_new": (21, 2, 63)}, r"k_cache must have shape \[5, 2, 16, 63\], got \[5, 2, 16, 64\]"),
        ({"v_new": (20, 2, 64)}, r"v_new must have shape \[21, 2, 64\], got \[20, 2, 64\]"),
        ({"slot_mapping": (20,)}, r"slot_mapping must have shape \[21\], got \[20\]"),
        ({"k_scale": (5, 2, 16)}, "k_scale must be None, because the native kernel does not support it"),
    ],
)
def test_the_operator_checks_for_itself(changes: dict[str, tuple[int, ...]], words: str) -> None:
    arguments = make_arguments(Case("raw"))
    for name, shape in changes.items():
        arguments[name] = zeros(*shape, dtype=torch.int64 if name == "slot_mapping" else torch.float16)
    with pytest.raises(RuntimeError, match=f"fastattn.append_to_cache: {words}"):
        torch.ops.fastattn.append_to_cache(**arguments)


# --- The CUDA C++ kernel ----------------------------------------------------------------------------------------------


def test_instances_cover_head_dims_and_dtypes() -> None:
    rows = instances.rows_of("decode/instances/append_sm80.cu")
    assert rows == sorted(itertools.product((64, 128, 256), instances.DTYPES, native.CACHE_FORMATS))


@only_emulated
@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@each_cache
def test_bytes_moved(int8: bool) -> None:
    """Each sector moves once; skipped tokens are not read."""
    tokens, skipped = 40, 8
    case = Case("bytes", tokens=tokens, kv_heads=4, dims=(128, 128), int8=int8, absent=(-1,) * skipped)
    with launches.recorded() as found, checked(), cuda_runtime.raising_faults():
        torch.ops.fastattn.append_to_cache(**make_arguments(case))
    (report,) = (launched.report for launched in found)
    assert report.kernel.startswith("_ZN8fastattn18decode_append_sm80")
    rows = 2 * 4 * (tokens - skipped)
    loaded = sum(32 * row.global_sectors for row in report.rows if row.opcode.startswith("ld.global.v4"))
    stored = sum(32 * row.global_sectors for row in report.rows if row.opcode.startswith("st.global.v"))
    assert loaded == rows * 256
    assert stored == rows * (128 if int8 else 256)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs(backend: str) -> None:
    arguments = make_arguments(Case("graph", absent=(-1,)))
    wanted = expected(arguments)
    warm = make_arguments(Case("graph"))
    fastattn.append_to_cache(**warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fastattn.append_to_cache(**arguments)
    graph.replay()
    check_caches(arguments, wanted)
