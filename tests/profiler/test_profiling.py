"""Tests fastattn.profile(): a kernel's operator, its work, how near it came to its limit, and memory by region."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastattn
import fastattn.distributed
from fastattn.profiler import kernel_names, kernel_work, trace, work
from fastattn.profiler.kernels import profile_kernels
from fastattn.profiler.operator_calls import OperatorCall, operator_call
from fastattn.profiler.roofline import COMPUTE, LAUNCH, MEMORY, Limits
from fastattn.profiler.tables import kernel_table
from fastattn.profiler.trace import KernelLaunch
from fastattn.profiler.work import Work

ROOT = Path(__file__).parents[2]
LIMITS = Limits(bytes_per_s=1e12, flops_per_s={"float16": 1e14}, eager_launch_s=5e-6, graph_launch_s=1e-6)


def call_of(name: str, **arguments: Any) -> OperatorCall:
    """Returns a call as the profiler reports it: shapes of float16 tensors (or dtype and shape), scalars as texts."""
    schema = getattr(torch.ops.fastattn_triton, name).default._schema
    shapes, dtypes, texts = [], [], []
    for argument in schema.arguments:
        given = arguments.pop(argument.name, None)
        dtype = "c10::Half"
        if isinstance(given, tuple) and given and isinstance(given[0], str):
            dtype, given = given
        is_tensor = isinstance(given, tuple)
        shapes.append(list(given) if is_tensor else [])
        dtypes.append(dtype if is_tensor else "" if given is None else "Scalar")
        texts.append("" if is_tensor or given is None else str(given))
    assert not arguments, f"no such arguments: {list(arguments)}"
    call = operator_call(f"fastattn_triton::{name}", shapes, dtypes, texts)
    assert call is not None
    return call


def attention_call(name: str = "attention_forward", **changes: Any) -> OperatorCall:
    query, key = (2, 4, 64, 32), (2, 2, 64, 32)
    arguments: dict[str, Any] = {"query": query, "key": key, "value": key, "scale": 0.1, "first_row": None}
    arguments |= {"window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0}
    arguments |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "first_key", "first_head"), 0)
    if name != "attention_forward":
        lse = ("float", query[:3])
        arguments |= {"grad_out": query, "out": query, "lse": lse, "deterministic": False, "slopes_grad": False}
    if name == "attention_backward":
        arguments["bias_grad"] = False
    return call_of(name, **(arguments | changes))


def work_of(kernel: str, call: OperatorCall) -> Work:
    found = kernel_work.kernel_work(kernel, call)
    assert found is not None
    return found


# --- the operators of kernels, and their work -------------------------------------------------------------------------


def launched_triton_kernels() -> list[tuple[str, str]]:
    """Returns (operator's module, kernel) for every kernel of triton_kernels that is launched on its own."""
    found = []
    for path in sorted((ROOT / "triton_kernels").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                found.append((path.stem, node.name))
    return found


def test_every_kernel_in_the_sources_is_known() -> None:
    operators = {"attention_forward": "attention_forward", "attention_backward": "attention_backward"}
    operators |= {"attention_ranges": "attention_forward"}
    operators |= {"decode_dequantize": "dequantize_cache", "decode": "attention_decode", "int8_matmul": "int8_matmul"}
    operators |= {name: name for name in ("merge_attention_backward", "merge_attention")}
    kernels = launched_triton_kernels()
    assert len(kernels) >= 10
    for module, kernel in kernels:
        operator = next(operators[start] for start in operators if module.startswith(start))
        if kernel == "grad_input_kernel":
            operator = "int8_matmul_grad_input"
        assert any(part in kernel for part in kernel_work._WORK[operator]), f"{kernel}: kernel_work does not know it"
        assert kernel_names.is_fastattn_kernel(kernel), f"{kernel}: not recognised in a CUDA graph"
    sources = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cuh"))
    compiled = re.findall(r"__global__[^(]*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(const", sources)
    assert len(compiled) == sources.count("__global__") > 0
    parts = {part for of_operator in kernel_work._WORK.values() for part in of_operator}
    assert all(any(part in kernel for part in parts) for kernel in compiled), f"kernel_work must know all of {compiled}"


def test_names_of_compiled_kernels() -> None:
    name = "void fastattn::attention_forward_sm80<64, (fastattn::DataType)1, true>(fastattn::AttentionForwardParams)"
    assert kernel_names.base_name(name) == "attention_forward_sm80"
    assert kernel_names.short_name(name) == "attention_forward_sm80<64, 1, true>"
    assert kernel_names.is_fastattn_kernel(name)
    assert kernel_names.short_name("split_kernel") == "split_kernel"
    other = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
    assert not kernel_names.is_fastattn_kernel(other)
    assert not kernel_names.is_fastattn_kernel("sm90_xmma_gemm_bf16_split_kernel")


def test_forward_work_is_that_of_the_shapes() -> None:
    call = attention_call()
    least = work_of("attention_forward_kernel", call)
    shapes = ((2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32))
    assert least == work.attention_forward(*shapes, 2, 2 * 4 * 64 * 64)
    causal = work_of("attention_forward_kernel", attention_call(window_right=0))
    assert causal.flops * 2 == least.flops and causal.bytes == least.bytes
    biased = work_of("attention_forward_kernel", attention_call(bias=(1, 4, 64, 64)))
    assert biased.bytes - least.bytes == 2 * 4 * 64 * 64
    assert call.dtype == "float16"


def test_packed_sequences_give_an_upper_bound() -> None:
    packed = {"query": (100, 4, 32), "key": (100, 2, 32), "value": (100, 2, 32), "cu_seqlens_q": ("int", (4,))}
    call = attention_call(**packed, cu_seqlens_k=("int", (4,)), max_seqlen_q=50, max_seqlen_k=50, window_right=0)
    least = work_of("attention_forward_kernel", call)
    assert least.is_upper_bound
    assert least.flops == 4 * 32 * 4 * 100 * 25


def test_backward_kernels_count_what_they_execute() -> None:
    call = attention_call("attention_backward")
    pairs, rows, element = 2 * 4 * 64 * 64, 2 * 4 * 64, 2
    query = 2 * 4 * 64 * 32 * element
    key = query // 2

    def of_kernel(name: str) -> Work:
        return work_of(f"attention_backward_{name}_kernel", call)

    assert of_kernel("key_value").flops == 4 * 2 * pairs * 32 and of_kernel("query").flops == 3 * 2 * pairs * 32
    assert of_kernel("bias").flops == 2 * 2 * pairs * 32
    assert of_kernel("key_value").bytes == 2 * query + 2 * key + 12 * rows + 2 * key
    assert of_kernel("query").bytes == 2 * query + 2 * key + 12 * rows + query
    assert of_kernel("rows").bytes == 3 * query + key + 4 * rows + 12 * rows


def test_gradients_that_are_added_are_read_and_written_in_float32() -> None:
    """They come on top of the 16-bit tensors that ``attention_backward`` reads."""
    of = {"query": (2, 4, 64, 32), "key": (2, 2, 64, 32), "value": (2, 2, 64, 32)}
    sums = {f"grad_{name}": ("float", shape) for name, shape in of.items()}
    call = attention_call("attention_backward_add", **sums)
    alone = attention_call("attention_backward")
    query = 2 * 4 * 64 * 32
    for name, added in (("key_value", query), ("query", query)):
        kernel = f"attention_backward_{name}_kernel"
        adding, writing = work_of(kernel, call), work_of(kernel, alone)
        assert adding.flops == writing.flops and adding.bytes == writing.bytes + (2 * 4 - 2) * added
    native = "void fastattn::attention_backward_query_sm90<64, (fastattn::DataType)0>(fastattn::Params)"
    assert kernel_work.kernel_work(native, call) == Work(0, 4 * query + 8 * query)


def test_native_backward_kernels_count_what_they_execute() -> None:
    """One kernel computes all five products, and sums the query's gradient in fp32."""
    call = attention_call("attention_backward", sinks=("float", (4,)))
    pairs, rows, sums = 2 * 4 * 64 * 64, 2 * 4 * 64, 2 * 4 * 64 * 32 * 4
    query = sums // 2
    key = query // 2

    def of_kernel(name: str) -> Work:
        return work_of(f"void fastattn::attention_backward_{name}_sm80<32, (fastattn::DataType)0>(fastattn::P)", call)

    assert of_kernel("rows") == Work(2 * rows * 32, 2 * query + 4 * rows + 8 * rows + sums)
    assert of_kernel("key_value") == Work(5 * 2 * pairs * 32, 2 * query + 2 * key + 12 * rows + 2 * key + 2 * sums)
    assert of_kernel("query") == Work(0, sums + query)
    assert of_kernel("bias").flops == 2 * 2 * pairs * 32
    assert of_kernel("sinks") == Work(0, 8 * rows)
    call = attention_call("attention_backward", alibi_slopes=("float", (1, 4)))
    assert of_kernel("slopes").flops == 2 * 2 * pairs * 32
    assert of_kernel("slope_sums") == Work(0, 4 * rows // 64 + 4 * 4)


def test_decode_and_int8_kernels() -> None:
    options = {"rotary_interleaved": False, "scale": 0.1, "window_left": -1, "window_right": 0, "softcap": 0.0}
    tensors = {"query": (3, 8, 1, 64), "k_cache": (40, 2, 16, 64), "v_cache": (40, 2, 16, 64)}
    lengths = {"cache_seqlens": ("int", (3,)), "block_table": ("int", (3, 5)), "num_splits": 0}
    new = {"k_new": (3, 2, 1, 64), "v_new": (3, 2, 1, 64)}
    call = call_of("attention_decode", **tensors, **lengths, **new, **options, batch_invariant=False)
    split = kernel_work.kernel_work("split_kernel", call)
    assert split == work.attention_decode((3, 8, 1, 64), 2, 64, 3 * 5 * 16, 2, 2)._replace(is_upper_bound=True)
    append = kernel_work.kernel_work("append_kernel", call)
    assert append == Work(0, 2 * 2 * (3 * 2 * 64) * 2)
    both = kernel_work.kernel_work("void fastattn::decode_split_sm80<64>(fastattn::DecodeParams)", call)
    assert both == split._replace(bytes=split.bytes + append.bytes)
    assert kernel_work.kernel_work("combine_kernel", call) is None
    call = call_of(
        "int8_matmul", x=(7, 5, 64), weight=("signed char", (96, 64)), scale=("float", (96, 1)), activation="none"
    )
    assert kernel_work.kernel_work("forward_kernel", call) == work.int8_matmul(35, 96, 64, 2, 96)
    weight = {"weight": ("signed char", (96, 64)), "scale": ("float", (96, 1))}
    swiglu = call_of("int8_matmul", x=(7, 5, 64), **weight, residual=(7, 5, 48))
    written_and_residual = 2 * 35 * 48
    expected = Work(2 * 35 * 96 * 64, 2 * (35 * 64 + written_and_residual) + 96 * 64 + 4 * 96)
    assert kernel_work.kernel_work("forward_kernel", swiglu) == expected
    assert kernel_work.kernel_work("merge_kernel", call) is None
    tensors = {"x": (35, 64), "weight": ("signed char", (96, 64)), "scale": ("float", (96, 1))}
    for int8_activations, dtype in ((False, "float16"), (True, "int8")):
        call = call_of("int8_matmul", **tensors, activation="none", int8_activations=int8_activations)
        assert call.dtype == dtype  # the products' dtype, whose peak is the limit
        assert kernel_work.kernel_work("int8_matmul_s8_sm80", call) == work.int8_matmul(35, 96, 64, 2, 96)
    call = call_of(
        "int8_matmul_grad_input", grad_out=(35, 96), weight=("signed char", (96, 64)), scale=("float", (96, 1))
    )
    assert kernel_work.kernel_work("grad_input_kernel", call) == work.int8_matmul(35, 96, 64, 2, 96)


def test_a_merge_reads_and_writes_everything_once() -> None:
    elements, rows = 2 * 4 * 64 * 32, 2 * 4 * 64
    lse = ("float", (2, 4, 64))
    merged = {"out_a": ("float", (2, 4, 64, 32)), "lse_a": lse, "out_b": (2, 4, 64, 32), "lse_b": lse}
    forward = kernel_work.kernel_work("merge_attention_kernel", call_of("merge_attention", **merged))
    assert forward == Work(0, (4 + 2 + 4) * elements + 3 * 4 * rows)
    in_place = dict(zip(("out", "lse", "block_out", "block_lse"), merged.values(), strict=True))
    into = kernel_work.kernel_work("merge_attention_kernel", call_of("merge_attention_into", **in_place))
    assert into == forward
    given = {"grad_out": ("float", (2, 4, 64, 32)), "grad_lse": lse, **merged}
    backward = kernel_work.kernel_work("merge_attention_backward_kernel", call_of("merge_attention_backward", **given))
    assert backward == Work(0, (4 + 2 * (4 + 2)) * elements + 5 * 4 * rows)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_shares_fractions_and_resources() -> None:
    call = attention_call(query=(2, 4, 4096, 32), key=(2, 4, 4096, 32), value=(2, 4, 4096, 32))
    least = work_of("attention_forward_kernel", call)
    decode = {"query": (3, 8, 1, 64), "k_cache": (3, 8, 4096, 64), "v_cache": (3, 8, 4096, 64)}
    options = {"rotary_interleaved": False, "scale": 0.1, "window_left": -1, "window_right": 0, "softcap": 0.0}
    lengths = {"cache_seqlens": ("int", (3,)), "num_splits": 0, "batch_invariant": False}
    cached = call_of("attention_decode", **decode, **options, **lengths)
    launches = [
        KernelLaunch("attention_forward_kernel", 4e-3, call),
        KernelLaunch("attention_forward_kernel", 2e-3, call),
        KernelLaunch("split_kernel", 1e-3, cached),
        KernelLaunch("split_kernel", 1e-3, None),
        KernelLaunch("void at::native::copy<float>(int)", 2e-3, None),
        KernelLaunch("attention_forward_kernel", 1e-9, attention_call(query=(1, 1, 1, 32))),
    ]
    rows = profile_kernels(launches, LIMITS)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    forward, copied, *splits = rows
    assert (forward.name, forward.operator, forward.launches) == ("attention_forward_kernel", "attention_forward", 3)
    assert forward.share == pytest.approx(0.6) and forward.resource == COMPUTE
    assert forward.fraction == pytest.approx((2 * least.flops / 1e14 + 1e-6) / (6e-3 + 1e-9))
    assert copied.operator is None and copied.flops is None and copied.fraction is None
    known = next(row for row in splits if row.operator == "attention_decode")
    graph = next(row for row in splits if row.operator == "")
    assert known.resource == MEMORY and known.is_upper_bound and graph.bytes is None
    text = kernel_table(rows)
    assert "(not fastattn)" in text and "(CUDA graph)" in text and "≤" in text and "60.0%" in text
    (tiny,) = profile_kernels(launches[-1:], LIMITS)
    assert tiny.resource == LAUNCH
    (without,) = profile_kernels(launches[:2], None)
    assert without.flops == 2 * least.flops and without.fraction is None


def test_work_without_flops_needs_no_measured_dtype() -> None:
    partial = {"out_a": ("float", (2, 4, 64, 32)), "lse_a": ("float", (2, 4, 64))}
    call = call_of("merge_attention", **partial, out_b=(2, 4, 64, 32), lse_b=("float", (2, 4, 64)))
    (row,) = profile_kernels([KernelLaunch("merge_attention_kernel", 1e-3, call)], LIMITS)
    assert row.flops == 0 and row.resource in (MEMORY, LAUNCH) and row.fraction is not None


def test_a_long_list_is_cut_and_says_so() -> None:
    launches = [KernelLaunch(f"kernel_{index}", 1e-3, None) for index in range(30)]
    text = kernel_table(profile_kernels(launches, None))
    assert "… and 10 more kernels, 33.3% of the time" in text


# --- traces -----------------------------------------------------------------------------------------------------------


def test_kernels_are_traced_to_the_operator_around_their_launch() -> None:
    def event(name: str, category: str, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "cat": category, "ph": "X", "tid": tid, "ts": ts, "dur": dur, "args": args}

    seen = attention_call()
    lists = {
        "Input Dims": [list(argument.shape) for argument in seen.arguments.values()],
        "Input type": [argument.dtype for argument in seen.arguments.values()],
        "Concrete Inputs": [argument.text for argument in seen.arguments.values()],
    }
    call = event("fastattn_triton::attention_forward", "cpu_op", 1, 100.0, 50.0, {"External id": 7, **lists})
    inner = event("aten::copy_", "cpu_op", 1, 110.0, 5.0, {"External id": 8})

    def launch(correlation: int, tid: int, ts: float) -> dict[str, Any]:
        return event("cuLaunchKernel", "cuda_driver", tid, ts, 1.0, {"correlation": correlation})

    def kernel(name: str, **args: int) -> dict[str, Any]:
        return event(name, "kernel", 99, 500.0, 12.5, args)

    events = [
        call,
        inner,
        launch(1, 1, 120.0),
        launch(2, 1, 160.0),
        launch(3, 2, 120.0),
        kernel("attention_forward_kernel", correlation=1),
        kernel("after", correlation=2),
        kernel("another thread's", correlation=3),
        kernel("a copy inside", **{"External id": 8}),
        kernel("launched elsewhere", correlation=3, **{"External id": 7}),
        kernel("from nowhere", correlation=44),
        {"name": "[memory]", "cat": "cpu_instant_event", "ph": "i", "ts": 1.0, "args": {}},
    ]
    found = {each.name: each.call for each in trace.kernel_launches(events)}
    assert list(found.values()) == [seen, None, None, seen, seen, None]
    assert trace.kernel_launches(events)[0].seconds == pytest.approx(12.5e-6)


def test_own_time_leaves_out_what_an_operator_called() -> None:
    def op(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        return {"name": name, "cat": "cpu_op", "ph": "X", "tid": tid, "ts": ts, "dur": dur, "args": {}}

    events = [
        op("outer", 0, 100),
        op("inner", 10, 30),
        op("innermost", 15, 5),
        op("inner", 50, 20),
        op("outer", 0, 7, 2),
    ]
    found = {each.name: (each.calls, round(each.self_seconds * 1e6)) for each in trace.cpu_operators(events)}
    assert found == {"outer": (2, 57), "inner": (2, 45), "innermost": (1, 5)}


def test_regions_of_memory() -> None:
    def change(ts: float, total: int, change: int, kind: int = 1) -> dict[str, Any]:
        args = {"Device Type": kind, "Total Allocated": total, "Bytes": change}
        return {"name": "[memory]", "ph": "i", "ts": ts, "args": args}

    def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"name": name, "cat": "user_annotation", "ph": "X", "ts": ts, "dur": dur, "args": {}}

    events = [
        mark("r: all", 0, 100),
        mark("r: first", 10, 20),
        mark("r: second", 50, 20),
        mark("not ours", 0, 100),
        change(15, 1500, 500),
        change(20, 1200, -300),
        change(60, 1100, -100),
        change(61, 64, 64, kind=0),
    ]
    regions = trace.memory_regions(events, "r: ")
    assert [region for region in regions if region.device == "cuda"] == [
        trace.Region("all", "cuda", 1000, 1500, 100),
        trace.Region("first", "cuda", 1000, 1500, 200),
        trace.Region("second", "cuda", 1200, 1200, -100),
    ]
    assert trace.Region("second", "cpu", 0, 64, 64) in regions
    assert [point.allocated for point in trace.memory_timeline(events) if point.device == "cuda"] == [1500, 1200, 1100]


# --- the context manager ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_the_cpu_operators_and_memory_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    query = torch.randn(1, 2, 32, 16)
    with fastattn.profile(path) as profile:
        with profile.region("attention"):
            out = fastattn.attention(query, query, query, causal=True, softcap=5.0)  # the reference runs
        with profile.region("outer"), profile.region("kept"):
            kept = torch.zeros(1000)
            del_me = torch.zeros(5000)
            del del_me
    assert isinstance(out, torch.Tensor) and kept.numel() == 1000
    assert profile.kernels == [] and profile.limits is None
    assert {"aten::bmm", "aten::zeros"} <= {each.name for each in profile.operators}
    regions = {region.name: region for region in profile.regions}
    assert list(regions) == ["attention", "outer", "kept"]
    assert regions["kept"].delta == regions["outer"].delta == 4000
    assert regions["kept"].peak - regions["kept"].allocated == 24000
    assert regions["attention"].delta == out.nbytes
    assert profile.memory and {point.device for point in profile.memory} == {"cpu"}
    text = str(profile)
    assert "No kernel ran on a GPU" in text and "aten::bmm" in text and "peak MB" in text
    assert any(event.get("name") == "aten::bmm" for event in json.loads(path.read_text())["traceEvents"])


def test_the_operators_shapes_reach_the_trace(tmp_path: Path) -> None:
    """A call on tensors without memory has the shapes that kernels are traced to."""
    path = tmp_path / "trace.json"
    query = torch.empty(1, 2, 16, 32, dtype=torch.float16, device="meta")
    with fastattn.profile(path):
        nothing = (None,) * 6
        options = (0, 0, 0.1, -1, 0, None, 0, 0, 0.0, 0.0)
        torch.ops.fastattn_triton.attention_forward(query, query, query, *nothing, *options)
    (event,) = (e for e in json.loads(path.read_text())["traceEvents"] if e["name"].startswith("fastattn_triton::"))
    args = event["args"]
    call = operator_call(event["name"], args["Input Dims"], args["Input type"], args["Concrete Inputs"])
    assert call is not None and call["query"].shape == (1, 2, 16, 32) and call.number("window_right") == 0
    least = kernel_work.kernel_work("attention_forward_kernel", call)
    assert least == work.attention_forward(*((1, 2, 16, 32),) * 3, 2, 2 * 16 * 16 // 2)


def test_bad_arguments_raise_before_the_block(tmp_path: Path) -> None:
    with pytest.raises(fastattn.InputError, match="trace: expected a file in a folder that exists"):
        fastattn.profile(tmp_path / "missing" / "trace.json")
    with pytest.raises(TypeError, match="limits: expected"):
        fastattn.profile(limits=3)  # type: ignore[arg-type]


def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), fastattn.profile() as profile:
        1 / 0  # noqa: B018
    assert profile.operators == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif("cuda_torch.autoload" in sys.modules, reason="needs CUPTI, which the emulated GPU lacks")
def test_on_a_gpu_kernels_are_held_against_measured_limits() -> None:
    query = torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    fastattn.attention(query, query, query, causal=True).sum().backward()
    with fastattn.profile() as profile, profile.region("step"):
        fastattn.attention(query, query, query, causal=True).sum().backward()
    own = [kernel for kernel in profile.kernels if kernel.operator is not None]
    assert {kernel.operator for kernel in own} == {"attention_forward", "attention_backward"}
    for kernel in own:
        if kernel.flops is not None:
            assert kernel.fraction is not None and 0 < kernel.fraction < 1.2, kernel
    assert any(region.device == "cuda" and region.peak > 0 for region in profile.regions)
