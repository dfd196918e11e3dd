"""Tests the choice of a backend: explain, record, use_backend, sdpa_kernel, detours, and the patch of torch's SDPA."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import fastattn
from fastattn.dispatch import choose as dispatch
from fastattn.dispatch import device
from fastattn.dispatch.device import DeviceFacts
from fastattn.dispatch.request import Choice, Request
from fastattn.dispatch.support import FEATURES, SUPPORT, support_table
from fastattn.ops import registration
from fastattn.ops.describe import ATTENTION, INT8_MATMUL, MERGE, AttentionDetails, Int8Details
from kernel_device import DEVICE

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]

H200 = DeviceFacts(arch=90, num_sms=132, shared_memory_bytes=227 * 1024, driver_cuda=13000)
TURING = DeviceFacts(arch=75, num_sms=68, shared_memory_bytes=64 * 1024, driver_cuda=13000)
GPU = torch.device("cuda", 0)


def call(**changes: object) -> Request:
    sizes = AttentionDetails(1, 8, 8, 512, 512)
    usual = Request(ATTENTION, GPU, torch.bfloat16, frozenset({"causal"}), 128, 128, sizes)
    return usual._replace(**changes)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the dispatcher believe that there is an H200, and a library with kernels for it."""
    monkeypatch.setattr(dispatch, "facts", lambda device: H200 if device.type == "cuda" else None)
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80", "90a"])
    monkeypatch.setitem(dispatch.native.BUILD, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.setattr(dispatch, "_warned", set())


@pytest.mark.usefixtures("h200")
class TestChoice:
    def test_native_comes_first_where_it_can(self) -> None:
        choice = dispatch.choose(call())
        assert choice.backend == "cuda"
        assert "128" in choice.kernel and "bfloat16" in choice.kernel
        assert set(choice.tile) == {"block_m", "block_n", "num_warps"}
        assert set(choice.rejected) == {"triton", "torch"}

    @pytest.mark.parametrize("feature", sorted(SUPPORT["attention"]["triton"].features))
    def test_every_feature_finds_a_kernel(self, feature: str) -> None:
        choice = dispatch.choose(call(features=frozenset({feature}), head_dim=96, value_dim=96))
        native = feature in SUPPORT["attention"]["cuda"].features
        assert choice.backend == ("cuda" if native else "triton")
        if not native:
            assert FEATURES["attention"][feature] in choice.rejected["cuda"]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"dtype": torch.float32}, "float32"),
            ({"head_dim": 520}, "520"),
            ({"head_dim": 0}, "0"),
            ({"features": frozenset({"paged gradients"})}, "gradients over paged keys and values"),
            ({"only_torch": "an argument is a DTensor."}, "DTensor"),
        ],
    )
    def test_detour_says_why_and_warns_once(self, changes: dict[str, object], words: str) -> None:
        with pytest.warns(RuntimeWarning, match=words):
            choice = dispatch.choose(call(**changes))
        assert choice.backend == "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dispatch.choose(call(**changes))

    def test_a_detour_names_each_reason_once(self) -> None:
        both = r"in PyTorch: the dtype is torch.float32, and the kernels take float16, bfloat16; cast .*autocast\.$"
        with pytest.warns(RuntimeWarning, match=both):
            dispatch.choose(call(dtype=torch.float32))
        each = "in PyTorch: cuda: the head dim is 600, .* triton: the head dim is 600, "
        with pytest.warns(RuntimeWarning, match=each):
            dispatch.choose(call(head_dim=600, value_dim=600))

    @pytest.mark.parametrize(
        ("backend", "dims", "padded"),
        [
            ("cuda", (20, 33), (24, 40)),
            ("cuda", (1, 64), (8, 64)),
            ("triton", (4, 250), (16, 256)),
            ("cuda", (64, 8), None),
            ("triton", (16, 256), None),
        ],
    )
    def test_other_head_dims_are_padded(
        self, backend: str, dims: tuple[int, int], padded: tuple[int, int] | None
    ) -> None:
        with fastattn.use_backend(backend):
            choice = dispatch.choose(call(head_dim=dims[0], value_dim=dims[1]))
            seen = padded or dims
            assert choice.padded == padded
            unpadded = dispatch.choose(call(head_dim=seen[0], value_dim=seen[1]))
            assert (choice.kernel, choice.tile) == (unpadded.kernel, unpadded.tile)

    def test_detour_can_be_an_error_or_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTATTN_FALLBACK", "error")
        with pytest.raises(fastattn.InputError, match=r"FASTATTN_FALLBACK=error.*float32"):
            dispatch.choose(call(dtype=torch.float32))
        monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dispatch.choose(call(dtype=torch.float32))
        monkeypatch.setenv("FASTATTN_FALLBACK", "loud")
        with pytest.raises(fastattn.InputError, match="FASTATTN_FALLBACK: expected one of 'silent', 'warn', 'error'"):
            dispatch.choose(call(dtype=torch.float32))

    def test_detours_can_be_forbidden_in_compiled_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "facts", lambda device: H200)
        monkeypatch.setenv("FASTATTN_FALLBACK", "error")
        compiled = torch.compile(fastattn.attention, fullgraph=True, backend="eager")
        query = torch.randn(1, 2, 4, 20)
        with pytest.raises(Exception, match=r"FASTATTN_FALLBACK=error.*float32"):
            compiled(query, query, query)

    @pytest.mark.parametrize(
        ("build", "driver", "words"),
        [
            ({"archs": []}, 13000, "without CUDA C.. kernels; `python -m fastattn` says"),
            ({"code": {"80": ["sm_80"]}}, 13000, "the library was built for other GPUs"),
            ({}, 12060, r"the driver supports CUDA 12\.6, and the library was built with 13\.0"),
        ],
        ids=["no kernels", "no code", "old driver"],
    )
    def test_triton_for_want_of_a_build_or_a_driver_warns_once(
        self, build: dict[str, object], driver: int, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in build.items():
            monkeypatch.setitem(dispatch.native.BUILD, name, value)
        monkeypatch.setattr(dispatch, "facts", lambda device: H200._replace(driver_cuda=driver))
        with pytest.warns(
            RuntimeWarning, match=f"Triton kernels here instead of its CUDA C.. ones: .*{words}"
        ) as warned:
            choice = dispatch.choose(call())
        assert choice.backend == "triton" and [warning.filename for warning in warned] == [__file__]
        assert str(warned[0].message).endswith(choice.rejected["cuda"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dispatch.choose(call())  # warns once
            monkeypatch.setattr(dispatch, "_warned", set())
            with fastattn.use_backend("triton"):
                dispatch.choose(call())
            dispatch.choose(call(head_dim=512, value_dim=512))  # no CUDA C++ kernel takes it
            merge = call(op=MERGE, features=frozenset(), head_dim=0, value_dim=0)
            assert dispatch.choose(merge).backend == "triton"
            monkeypatch.setenv("FASTATTN_FALLBACK", "silent")
            dispatch.choose(call())

    def test_forcing_a_backend(self) -> None:
        for backend in ("cuda", "triton", "torch"):
            with fastattn.use_backend(backend):
                assert dispatch.choose(call()).backend == backend
        impossible = r'use_backend\("cuda"\) cannot run this call: .*gradients over paged keys and values'
        with pytest.raises(fastattn.InputError, match=impossible), fastattn.use_backend("cuda"):
            dispatch.choose(call(features=frozenset({"paged gradients"})))
        with (
            pytest.raises(fastattn.InputError, match="backend: expected one of 'cuda', 'triton', 'torch', got 'metal'"),
            fastattn.use_backend("metal"),
        ):
            pass

    def test_forcing_by_a_decorator(self) -> None:
        @fastattn.use_backend("torch")
        def chosen(depth: int) -> list[str]:
            below = chosen(depth - 1) if depth else []
            return [*below, dispatch.choose(call()).backend]

        assert chosen(2) == ["torch"] * 3
        assert dispatch.choose(call()).backend == "cuda"

    def test_a_refusal_names_the_backend_that_can(self) -> None:
        over_pages = call(features=frozenset({"varlen", "paged", "paged key ranges"}))
        with pytest.raises(fastattn.InputError, match=r'use_backend\("triton"\) can\.$'), fastattn.use_backend("cuda"):
            dispatch.choose(over_pages)

    def test_forcing_is_for_this_thread(self) -> None:
        seen: list[str] = []
        with fastattn.use_backend("torch"):
            thread = threading.Thread(target=lambda: seen.append(dispatch.choose(call()).backend))
            thread.start()
            thread.join()
            assert dispatch.choose(call()).backend == "torch"
        assert seen == ["cuda"]

    def test_sdpa_kernel_means_torch_and_is_no_detour(self) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("error")
            choice = dispatch.choose(call())
        assert choice.backend == "torch" and "sdpa_kernel" in choice.rejected["cuda"]

    def test_sdpa_kernel_says_nothing_about_linear_layers(self) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            linear = call(op=INT8_MATMUL, features=frozenset(), details=Int8Details(4, 64, 64))
            assert dispatch.choose(linear).backend == "cuda"

    def test_old_gpus_are_told_what_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "facts", lambda device: TURING)
        with pytest.warns(RuntimeWarning, match=r"compute capability 7\.5.*need 8\.0"):
            assert dispatch.choose(call()).backend == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors are on an emulated GPU only where there is no other")
def test_what_cpu_tensors_are_on_can_be_declared() -> None:
    query = torch.zeros(1, 2, 4, 16, dtype=torch.float16, requires_grad=True)
    weight, scale = torch.zeros(8, 16, dtype=torch.int8), torch.ones(8, 1)

    def reason() -> str:
        return fastattn.explain(fastattn.attention, query, query, query).rejected["triton"]

    before = device.emulate_on_cpu(None)
    try:
        assert "move them to cuda" in reason()
        with pytest.raises(NotImplementedError):
            torch.ops.fastattn_triton.int8_matmul(query.detach()[0, 0], weight, scale, None, None, "none")
        assert device.emulate_on_cpu(TURING) is None
        assert "compute capability 7.5" in reason()
    finally:
        assert device.emulate_on_cpu(before) in (TURING, None)
    assert fastattn.explain(fastattn.attention, query, query, query).backend in ("cuda", "triton")
    assert torch.ops.fastattn_triton.int8_matmul(query.detach()[0, 0], weight, scale, None, None, "none").shape == (
        4,
        8,
    )


def test_explain_runs_nothing_and_prints_well() -> None:
    query = torch.randn(1, 2, 4, 16)
    with fastattn.record() as calls:
        explanation = fastattn.explain(fastattn.attention, query, query, query, causal=True)
    assert calls == []
    assert explanation.backend == "torch" and set(explanation.rejected) == {"cuda", "triton"}
    (reason,) = set(explanation.rejected.values())  # one reason against both
    assert str(explanation).endswith(f"  not cuda, triton: {reason}")


def test_explain_leaves_the_random_generator_alone() -> None:
    query = torch.ones(1, 1, 4, 16)
    before = torch.get_rng_state()
    fastattn.explain(fastattn.attention, query, query, query, dropout_p=0.5)
    fastattn.explain(fastattn.scaled_dot_product_attention, query, query, query, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_sends_tensors_to_a_gpu() -> None:
    query = torch.randn(1, 2, 4, 16, device="meta")
    reasons = fastattn.explain(fastattn.attention, query, query, query).rejected
    assert "on meta" in reasons["cuda"] and "move them to cuda" in reasons["triton"]


def test_explain_names_tensors_that_are_copied() -> None:
    query = torch.randn(1, 2, 4, 16, device=DEVICE).half()
    crooked = torch.randn(1, 2, 16, 4, device=DEVICE).half().transpose(2, 3)
    with fastattn.use_backend("triton"):
        explanation = fastattn.explain(fastattn.attention, query, crooked, query)
    assert explanation.copied == {"key": "its last dimension is not contiguous"}
    assert "copied first: key" in str(explanation) and explanation.tile is not None


def test_explain_refuses_a_result() -> None:
    query = torch.randn(1, 2, 4, 16)
    with pytest.raises(fastattn.InputError, match=r"function: expected a function and then .*, got torch.Tensor"):
        fastattn.explain(fastattn.attention(query, query, query))


def test_explain_refuses_what_never_reaches_fastattn() -> None:
    with pytest.raises(TypeError, match="function: expected one that calls fastattn"):
        fastattn.explain(torch.add, torch.ones(1), torch.ones(1))
    query = torch.randn(1, 2, 4, 16)
    with pytest.raises(TypeError, match=r"but torch\.\S*scaled_dot_product_attention .*; explain it inside of"):
        fastattn.explain(torch.nn.functional.scaled_dot_product_attention, query, query, query)


def test_explain_raises_what_the_call_raises() -> None:
    with pytest.raises(fastattn.InputError, match="key"):
        fastattn.explain(
            fastattn.attention, torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 16)
        )


def test_record_lists_forward_and_backward_and_nests() -> None:
    query = torch.randn(1, 1, 4, 16, dtype=torch.float16, device=DEVICE, requires_grad=True)
    with fastattn.use_backend("triton"), fastattn.record() as outer:
        with fastattn.record() as inner:
            out = fastattn.attention(query, query, query)
        out.sum().backward()
    assert [entry.op for entry in inner] == ["attention"]
    assert [(entry.op, entry.backend) for entry in outer] == [("attention", "triton"), ("attention backward", "triton")]


@pytest.mark.slow
def test_record_names_the_kernels_of_the_backward_pass() -> None:
    query = torch.randn(1, 1, 4, 16, dtype=torch.float16, device=DEVICE, requires_grad=True)
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float16, device=DEVICE, requires_grad=True)
    slopes = torch.zeros(1, device=DEVICE, requires_grad=True)
    weight = fastattn.quantize_int8(torch.randn(16, 16, device=DEVICE))
    with fastattn.use_backend("triton"):
        out = fastattn.attention(query, query, query)
        biased = fastattn.attention(query, query, query, bias=bias)
        sloped = fastattn.attention(query, query, query, alibi_slopes=slopes)
        y = fastattn.int8_linear(query, weight)
        kernels = []
        for result in (out, biased, sloped, y):
            with fastattn.record() as calls:
                result.sum().backward()
            kernels += [(call.op, call.kernel.split(" + ")) for call in calls]
    parts = ["rows", "query", "key_value"]
    names = [f"attention_backward_{part}.attention_backward_{part}_kernel" for part in [*parts, "bias", "slopes"]]
    assert kernels == [
        ("attention backward", names[:3]),
        ("attention backward", names[:4]),
        ("attention backward", [*names[:3], names[4]]),
        ("int8_matmul backward", ["int8_matmul.grad_input_kernel"]),
    ]


def refused_calls() -> list[Callable[[], object]]:
    """Returns calls with a bad argument, an impossible choice, a kernel's refusal, and PyTorch's own error."""
    query = torch.randn(1, 1, 4, 16, dtype=torch.float16)
    three_dims = torch.randn(1, 1, 2, 4, 16)
    return [
        lambda: fastattn.attention(query, query[..., :8], query),
        lambda: fastattn.attention(query.float(), query.float(), query.float()),
        lambda: fastattn.scaled_dot_product_attention(query, query[..., :8], query),
        lambda: fastattn.scaled_dot_product_attention(query, three_dims, query, enable_gqa=True),
    ]


@pytest.mark.parametrize("index", range(len(refused_calls())))
def test_record_lists_no_call_that_was_refused(index: int) -> None:
    backend = "triton" if index == 1 else "torch"
    with fastattn.record() as calls, fastattn.use_backend(backend), pytest.raises((RuntimeError, TypeError)):
        refused_calls()[index]()
    assert calls == []


def test_record_lists_no_call_whose_kernel_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of shared memory")

    query = torch.randn(1, 1, 4, 16, dtype=torch.float16, device=DEVICE, requires_grad=True)
    with fastattn.use_backend("triton"), fastattn.record() as calls:
        out = fastattn.attention(query, query, query)
        for name in ("attention_forward", "attention_backward"):
            monkeypatch.setitem(registration._operators[name]._overloads, "triton", fail)
        with pytest.raises(RuntimeError, match="out of shared memory"):
            fastattn.attention(query.detach(), query.detach(), query.detach())
        with pytest.raises(RuntimeError, match="out of shared memory"):
            out.sum().backward()
    assert [entry.op for entry in calls] == ["attention"]


def test_choices_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Choice("torch", "PyTorch", ATTENTION).backend = "cuda"  # type: ignore[misc]


def test_support_table_covers_every_feature_and_stands_in_the_readme() -> None:
    table = support_table()
    for features in FEATURES.values():
        assert all(words in table for words in features.values())
    readme = (__import__("pathlib").Path(__file__).parents[2] / "README.md").read_text()
    assert table in readme, "README.md: paste what `python -m fastattn` prints below the facts"


class TestPatch:
    def test_importing_replaces_nothing_and_the_block_does(self) -> None:
        assert F.scaled_dot_product_attention is not fastattn.scaled_dot_product_attention
        with fastattn.patch_sdpa():
            assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention

    def test_nests_and_survives_exceptions(self) -> None:
        with pytest.raises(KeyError), fastattn.patch_sdpa():
            with fastattn.patch_sdpa():
                pass
            assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
            raise KeyError
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention

    def test_installing_twice_is_one_install(self) -> None:
        fastattn.install()
        fastattn.install()
        with fastattn.patch_sdpa():
            fastattn.uninstall()
            assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention  # the block is still open
            fastattn.install()
        assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
        fastattn.uninstall()
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        with fastattn.patch_sdpa(), pytest.raises(RuntimeError, match="uninstall"):
            fastattn.uninstall()
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention

    def test_modules_that_hold_torchs_function_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fastattn.missed_modules()
        late, early = ModuleType("package.late"), ModuleType("package.early")
        early.attend, early.fastattn = F.scaled_dot_product_attention, fastattn
        for module in (early, late):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        with fastattn.patch_sdpa():
            late.attend = F.scaled_dot_product_attention
            assert set(fastattn.missed_modules()) - set(before) == {"package.early.attend"}
        assert set(fastattn.missed_modules()) - set(before) == {"package.early.attend"}

    def test_uninstall_puts_back_what_stood_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def somebody_elses() -> None:
            raise AssertionError

        monkeypatch.setattr(F, "scaled_dot_product_attention", somebody_elses)
        with fastattn.patch_sdpa():
            assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is somebody_elses

    def test_torch_fx_traces_through_it(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        x = torch.randn(1, 2, 5, 16)
        with fastattn.patch_sdpa():
            traced = torch.fx.symbolic_trace(Model())
        torch.testing.assert_close(traced(x), F.scaled_dot_product_attention(x, x, x))

    def test_many_threads_leave_it_as_it_was(self) -> None:
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            for _ in range(200):
                with fastattn.patch_sdpa():
                    assert F.scaled_dot_product_attention is fastattn.scaled_dot_product_attention

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        assert torch.backends.mha.get_fastpath_enabled()

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_multihead_attention_comes_here_when_it_needs_no_weights(self, need_weights: bool) -> None:
        torch.manual_seed(0)
        layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        x = torch.randn(2, 5, 16)
        with torch.no_grad():
            expected = layer(x, x, x, need_weights=need_weights)[0]
            with fastattn.patch_sdpa(), fastattn.record() as calls:
                actual = layer(x, x, x, need_weights=need_weights)[0]
        assert bool(calls) is not need_weights
        torch.testing.assert_close(actual, expected)
