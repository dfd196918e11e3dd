"""Tests which CUDA C++ kernel runs a call: the library launches the kernel that it names. Tests device facts, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_cases
import fastattn
import kernel_symbols
from cuda_kernels import DTYPES, MARKS, each_dtype, only_emulated
from fastattn import native
from fastattn.__main__ import native_code_for
from kernel_device import DEVICE

pytestmark = [*MARKS, only_emulated]

if DEVICE == "cpu":
    from emulator import cuda_runtime, device, launches
    from emulator.native import native as emulator_native

ops = torch.ops.fastattn
KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 90: 227 * KIB}  # maximum shared memory of a CTA


def heads(rows: int, head_dim: int = 64, num: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, num, rows, head_dim, generator=torch.Generator().manual_seed(rows)).to(dtype)


def test_the_tutorial_shows_what_explain_prints() -> None:
    """The page explains a call in bfloat16, in float32, and with head dim 60."""
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "explain_and_profile.md"
    shown = re.findall(r"^```text\n(.*?)\n^```", page.read_text(), re.MULTILINE | re.DOTALL)
    with device.emulated(90, 132):
        for text, query in zip(shown, (heads(64), heads(64).float(), heads(64, 60)), strict=True):
            said = fastattn.explain(fastattn.attention, query, query, query, causal=True, softcap=30.0)
            assert text == str(said)


def launched_names(found: list[Any]) -> list[str]:
    return [kernel_symbols.name_of(launched.report.kernel) for launched in found]


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window to the left": {"window": (3, 0)},
    "window that is a causal mask": {"window": (-1, 0)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.zeros(2)},
    "bias": {"bias": torch.zeros(1, 1, 9, 33, dtype=torch.bfloat16)},
    "alibi": {"alibi_slopes": torch.ones(2)},
    "causal and softcap": {"causal": True, "softcap": 5.0},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 192])
def test_forward_launches_what_the_library_names(name: str, head_dim: int) -> None:
    query, key = heads(9, head_dim), heads(33, head_dim)
    with fastattn.use_backend("cuda"), launches.recorded() as found, fastattn.record() as calls:
        fastattn.attention(query, key, key, **OPTIONS[name])
    assert launched_names(found) == [call.kernel for call in calls]
    assert calls[0].kernel in native.KERNELS


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_packed_forward_launches_what_the_library_names(paged: bool) -> None:
    query, offsets = heads(9)[0].transpose(0, 1), torch.tensor([0, 4, 9], dtype=torch.int32)
    key = heads(32).expand(2, -1, -1, -1).contiguous() if paged else query
    table = torch.arange(2, dtype=torch.int32).view(2, 1) if paged else None
    with fastattn.use_backend("cuda"), launches.recorded() as found, fastattn.record() as calls:
        fastattn.attention_varlen(query, key, key, offsets, offsets, 9, 9, block_table=table)
    assert launched_names(found) == [call.kernel for call in calls]
    assert calls[0].kernel in native.KERNELS and calls[0].kernel.endswith("paged>") is paged


@each_dtype
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": (4, 2)},
        {"softcap": 3.0},
        {"sinks": True},
        {"mask": "float"},
        {"mask": "bool"},
        {"alibi": "head"},
        {"head_dims": (96, 40)},
        {"mask": "float", "sinks": True, "head_dims": (136, 8)},
        {"ranges": 2},
    ],
    ids=str,
)
def test_backward_launches_what_the_library_names(changes: dict[str, Any], dtype: torch.dtype) -> None:
    case = attention_cases.Case(dtype=dtype, **changes)
    problem = attention_cases.make_problem(case)
    with launches.recorded() as found:
        attention_cases.run_ops(ops, case, problem)
    num_forward = 2 if case.ranges else 1
    backward = launched_names(found)[num_forward:]
    named = native.attention_backward_kernels(
        80,
        SHARED_BYTES[80],
        *case.head_dims,
        dtype,
        changes_scores=bool(case.softcap or case.mask or case.alibi or case.ranges),
        key_ranges=case.ranges > 0,
        bias_gradient=case.mask == "float",
        sinks=case.sinks,
        slopes_gradient=bool(case.alibi),
    )
    assert tuple(backward) == named and set(named) <= set(native.KERNELS)


@each_dtype
@pytest.mark.parametrize("head_dim", [16, 64, 128, 208])
@pytest.mark.parametrize("cache_format", native.CACHE_FORMATS)
def test_decode_launches_what_the_library_names(head_dim: int, cache_format: str, dtype: torch.dtype) -> None:
    query, cache = heads(1, head_dim, dtype=dtype), heads(40, head_dim, dtype=dtype)
    scales = {} if cache_format == "16-bit" else {"k_scale": torch.ones(1, 2, 40), "v_scale": torch.ones(1, 2, 40)}
    cache = cache.to({"16-bit": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[cache_format])
    lengths = torch.tensor([40], dtype=torch.int32)
    with fastattn.use_backend("cuda"), launches.recorded() as found, fastattn.record() as calls:
        fastattn.attention_with_kv_cache(query, cache, cache.clone(), lengths, **scales)
    assert launched_names(found) == [native.decode_kernel(80, SHARED_BYTES[80], head_dim, dtype, cache_format, rows=3)]
    assert launched_names(found) == [call.kernel for call in calls]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_int8_matmul_launches_what_the_library_names(tokens: int, arch: int) -> None:
    weight = fastattn.quantize_int8(torch.randn(256, 128))
    x = torch.randn(tokens, 128).half()
    with device.emulated(arch, num_sms=2), fastattn.use_backend("cuda"), launches.recorded() as found:
        with fastattn.record() as calls:
            fastattn.int8_linear(x, weight)
        ops.int8_matmul_grad_input(torch.randn(tokens, 256).half(), weight.data, weight.scale, False)
        ops.int8_matmul(x, weight.data, weight.scale, None, None, "none", True)
    sums = (("int8_matmul", 256, 128), ("int8_matmul_grad_input", 128, 256), ("int8_matmul_s8", 256, 128))
    products = [native.Int8Product(op, torch.float16, False, False, tokens, *sizes) for op, *sizes in sums]
    named = [native.int8_matmul_kernel(product, arch, num_sms=2) for product in products]
    multiplying = [name for name in launched_names(found) if not name.startswith("int8_matmul_quantize_tokens_sm90<")]
    assert multiplying == named  # Hopper's kernel for int8 activations needs another kernel before it, which makes them
    assert [call.kernel for call in calls] == named[:1]


@each_dtype
@pytest.mark.parametrize("changes_scores", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize(
    ("head_dims", "on_hopper", "on_ampere"),
    [
        ((64, 64), "64", "64"),
        ((64, 8), "64", "64"),
        ((8, 64), "64", "64"),
        ((128, 64), "128", "128"),
        ((64, 128), "128", "128"),
        ((192, 128), "192, 128", "192"),
        ((136, 72), "192, 128", "192"),
        ((192, 136), "192", "192"),
        ((128, 192), "192", "192"),
        ((192, 192), "192", "192"),
        ((200, 128), "256", "256"),
    ],
    ids=str,
)
def test_the_cheapest_kernel_that_has_room_for_both_head_dims(
    head_dims: tuple[int, int], on_hopper: str, on_ampere: str, changes_scores: bool, dtype: torch.dtype
) -> None:
    name = "attention_forward_options" if changes_scores else "attention_forward"
    text = str(dtype).removeprefix("torch.")
    for arch, dims in ((90, on_hopper), (80, on_ampere)):
        found = native.attention_forward_kernel(
            arch, SHARED_BYTES[arch], *head_dims, dtype, changes_scores=changes_scores
        )
        assert found == f"{name}_sm{arch}<{dims}, {text}>"


@each_dtype
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dims", [(192, 128), (144, 96), (192, 192), (128, 64), (64, 128)], ids=str)
def test_forward_for_hopper_launches_what_the_library_names(
    dims: tuple[int, int], softcap: float, dtype: torch.dtype
) -> None:
    query, key, value = heads(9, dims[0], dtype=dtype), heads(33, dims[0], dtype=dtype), heads(33, dims[1], dtype=dtype)
    with device.emulated(90, num_sms=2), fastattn.use_backend("cuda"), launches.recorded() as found:
        explained = fastattn.explain(fastattn.attention, query, key, value, softcap=softcap)
        fastattn.attention(query, key, value, softcap=softcap)
    named = native.attention_forward_kernel(90, SHARED_BYTES[90], *dims, dtype, changes_scores=softcap > 0)
    assert launched_names(found) == [named] == [explained.kernel]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_compiled_call_with_gradients_runs_what_an_eager_one_does_on_hopper(head_dim: int, dynamic: bool) -> None:
    """That is CUDA C++, the first of dispatch.support's KERNEL_BACKENDS."""
    query, key = heads(33, head_dim).requires_grad_(), heads(40, head_dim)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return fastattn.attention(query, key, key, causal=True)

    gradients, ran = [], []
    for call in (attend, torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")):
        with device.emulated(90, num_sms=2), launches.recorded() as found:
            gradients += torch.autograd.grad(call(query).sum(), query)
        ran.append([launched.report.kernel for launched in found])
    assert ran[0] == ran[1] and torch.equal(*gradients)
    assert all("_sm" in kernel for kernel in ran[0])


def test_the_library_names_no_kernel_for_a_gpu_that_has_none() -> None:
    for dtype in DTYPES:
        assert native.attention_forward_kernel(75, 64 * 1024, 64, 64, dtype) is None
        assert native.attention_forward_kernel(80, SHARED_BYTES[80], 264, 64, dtype) is None
        assert native.attention_forward_kernel(80, SHARED_BYTES[80], 64, 264, dtype) is None
        assert native.attention_backward_kernels(75, 64 * 1024, 64, 64, dtype) == ()
        assert native.decode_kernel(75, 64 << 10, 64, dtype, "16-bit", rows=1) is None
        product = native.Int8Product("int8_matmul", dtype, False, False, 1, 64, 64)
        assert native.int8_matmul_kernel(product, arch=75, num_sms=40) is None
    assert native.int8_matmul_schedule("int8_matmul", 75, 40, False, 1, 64, 64).ctas == 0
    assert native.decode_schedule(native.NativeDeviceFacts(75, 40, 0, 64 << 10), 64, "16-bit", 1, 1, 1, 64).ctas == 0


def test_a_gpu_without_kernels_is_an_error_that_names_it() -> None:
    query = heads(9)
    with cuda_runtime.pretend(75, 40, 64 * KIB), pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        ops.attention_forward(
            query, query, query, None, None, None, None, None, None, 0, 0, 1.0, -1, -1, None, 0, 0, 0.0, 0.0, None
        )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"80": ["sm_80", "compute_80"]}, {75: (), 80: ("sm_80",), 89: ("sm_80",), 90: ("PTX",), 120: ("PTX",)}),
        (
            {"80": ["sm_80", "sm_90", "compute_80"], "90a": ["sm_90a"]},
            {80: ("sm_80",), 90: ("sm_90a", "sm_90"), 100: ("PTX",)},
        ),
        ({"90a": ["sm_90a"], "80": ["sm_90"]}, {80: (), 89: (), 90: ("sm_90a", "sm_90"), 100: ()}),
        ({}, {80: (), 90: ()}),
    ],
)
def test_the_code_that_a_gpu_runs(
    monkeypatch: pytest.MonkeyPatch, code: dict[str, list[str]], expected: dict[int, tuple[str, ...]]
) -> None:
    """`code_for` concerns kernels for sm_90a, and kernels for sm_80 that have no counterpart for sm_90a."""
    monkeypatch.setitem(native.BUILD, "code", code)
    assert {arch: native.code_for(arch) for arch in expected} == expected
    for arch, names in expected.items():
        if names:
            assert native_code_for(arch).endswith("first use" if names == ("PTX",) else " and ".join(names))


# --- Device facts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "expected"), [(80, (80, 108, 40 << 20, 163 * KIB)), (90, (90, 132, 50 << 20, 227 * KIB))]
)
def test_device_facts_are_those_of_the_gpu_at_hand(arch: int, expected: tuple[int, ...]) -> None:
    with device.emulated(arch):
        facts = native.device_facts()
    assert (facts.arch, facts.num_sms, facts.l2_bytes, facts.shared_bytes_per_cta) == expected
    assert native.device_facts().arch == 80  # outside, the other GPU is current again


def test_shared_memory_is_asked_for_once_per_kernel_and_gpu() -> None:
    """The kernel has over 48 KB of shared memory and must ask for it. Each emulated GPU counts as another device."""
    query = heads(9, 128)

    def calls_of_launch(num_sms: int) -> int:
        before = emulator_native.runtime.attribute_calls()
        with device.emulated(80, num_sms=num_sms), launches.recorded() as found, fastattn.use_backend("cuda"):
            fastattn.attention(query, query, query)
        assert launched_names(found) == ["attention_forward_sm80<128, bfloat16>"]
        asked: int = emulator_native.runtime.attribute_calls() - before
        return asked

    calls_of_launch(108)
    calls = 2  # for the shared memory of a CTA, and of an SM
    assert [calls_of_launch(num_sms) for num_sms in (108, 1007, 108)] == [0, calls, 0]
