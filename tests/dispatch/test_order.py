"""Which backend comes first where several have a kernel for a call, and what ``explain`` says of that."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.dispatch import choose as dispatch
from fastattn.dispatch.call import Call
from fastattn.dispatch.device import DeviceFacts
from fastattn.dispatch.order import order_for
from fastattn.dispatch.support import CHANGES_SCORES, KERNEL_BACKENDS

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu")]

GPU = torch.device("cuda", 0)
CUDA, TRITON = ("cuda", "triton"), ("triton", "cuda")


def attention(head_dim: int, *features: str, value_dim: int | None = None) -> Call:
    value_dim = head_dim if value_dim is None else value_dim
    return Call("attention", GPU, torch.bfloat16, head_dim, value_dim, frozenset(features), (1, 8, 8, 512, 512))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts(arch=90, num_sms=132, shared_memory_bytes=227 * 1024, driver_cuda=13000)
    monkeypatch.setattr(dispatch, "facts", lambda device: facts if device.type == "cuda" else None)
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80", "90a"])
    monkeypatch.setitem(dispatch.native.BUILD, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "_choices", {})


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("features", [(), ("causal", "gqa"), ("window", "sinks", "varlen")], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_forward_pass_alone_runs_the_kernel_for_hopper(dims: tuple[int, int], features: tuple[str, ...]) -> None:
    choice = dispatch.choose(attention(dims[0], *features, value_dim=dims[1]))
    assert choice.backend == "cuda" and "_sm90<" in choice.kernel


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "dims", [(8, 8), (32, 32), (64, 64), (64, 16), (96, 64), (128, 128), (192, 128), (256, 256)], ids=str
)
def test_gradients_run_in_cuda_as_well(dims: tuple[int, int]) -> None:
    call = attention(dims[0], "causal", "gradients", value_dim=dims[1])
    assert order_for(call, 90).backends == CUDA
    assert dispatch.choose(call).backend == "cuda"


def test_gradients_count_both_passes(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward alone, 192 dims of Triton's are not predicted to be faster, nor are both passes."""
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80"])
    for dims, order in (((64, 64), TRITON), ((128, 128), TRITON), ((192, 128), CUDA), ((256, 256), CUDA)):
        call = attention(dims[0], "causal", "gradients", value_dim=dims[1])
        assert order_for(call, 90).backends == order
        assert dispatch.choose(call).backend == order[0]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("feature", sorted(CHANGES_SCORES))
def test_options_stay_with_cuda(feature: str) -> None:
    assert order_for(attention(64, feature, "gradients"), 90).backends == CUDA


def test_a_library_without_kernels_for_hopper_leaves_it_to_triton_where_that_is_faster(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch.native.BUILD, "archs", ["80"])
    triton_first = {40, 64, 104, 128, 200, 256}
    for head_dim in {32, 96, 192} | triton_first:
        assert order_for(attention(head_dim), 90).backends == (TRITON if head_dim in triton_first else CUDA)


@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
@pytest.mark.parametrize("features", [(), ("gradients",)], ids=str)
def test_cuda_comes_first_on_other_gpus(features: tuple[str, ...], arch: int) -> None:
    for head_dim in (64, 128, 256):
        assert order_for(attention(head_dim, *features), arch).backends == CUDA


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("op", ["decode", "int8_matmul"])
def test_cuda_comes_first_in_other_operations(op: str, arch: int) -> None:
    assert order_for(attention(64)._replace(op=op, features=frozenset({"gradients"})), arch).backends == CUDA


def test_every_order_has_every_backend_once() -> None:
    calls = [attention(head_dim, *features) for head_dim in range(0, 300, 4) for features in ((), ("gradients",))]
    for call in calls:
        assert sorted(order_for(call, 90).backends) == sorted(KERNEL_BACKENDS)


@pytest.mark.usefixtures("hopper")
def test_a_reason_says_why_the_other_comes_first_and_that_it_is_a_prediction() -> None:
    for features, chosen, other in (((), "cuda", "triton"), (("gradients",), "cuda", "triton")):
        reason = dispatch.choose(attention(64, *features)).rejected[other]
        passes = "the forward and the backward pass together are" if features else "the forward pass is"
        assert reason.startswith(f'"{chosen}" comes first: {passes} predicted, not measured, to take ')
        assert reason.endswith(f'use_backend("{other}") selects this one.')
    assert "to take 22% less time" in dispatch.choose(attention(64)).rejected["triton"]  # 412 clocks instead of 525
    trusted = dispatch.choose(attention(32)).rejected["triton"]  # 412 clocks and 415
    assert "no prediction to be trusted" in trusted


@pytest.mark.usefixtures("hopper")
def test_a_forced_backend_runs_whatever_the_order() -> None:
    for backend in KERNEL_BACKENDS:
        with fastattn.use_backend(backend):
            assert dispatch.choose(attention(64, "gradients")).backend == backend
