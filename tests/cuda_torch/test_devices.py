"""Tests devices, streams, threads and CUDA graphs, as a call meets them on a machine with GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from emulator import launches
from fastattn import reference
from oracle import check_against_oracle

OPTIONS: dict[str, Any] = {"causal": True, "window": (40, 0), "softcap": 9.0}
BACKENDS = ("cuda", "triton")
HOPPER, AMPERE = torch.device("cuda", 0), torch.device("cuda", 1)


def draw(*shape: int, device: torch.device = HOPPER, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def inputs(device: torch.device = HOPPER, rows: int = 70) -> list[Tensor]:
    return [draw(1, heads, rows, 64, device=device, seed=heads + i) for i, heads in enumerate((4, 2, 2))]


def check(name: str, out: Tensor, tensors: list[Tensor], **options: Any) -> None:
    wide = [tensor.detach().cpu().double() for tensor in tensors]
    exact = reference.attention(*wide, **options)[0]
    composite = reference.attention(*(tensor.detach().cpu() for tensor in tensors), **options)[0]
    check_against_oracle(name, out, exact, composite)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_than_the_current_one(backend: str) -> None:
    """Kernels run on the tensors' device, and the current device does not change."""
    tensors = [tensor.requires_grad_() for tensor in inputs(AMPERE)]
    assert torch.cuda.current_device() == 0
    with fastattn.use_backend(backend), fastattn.record() as calls:
        out = fastattn.attention(*tensors, **OPTIONS)
        out.float().cos().sum().backward()
    assert out.device == AMPERE and all(tensor.grad.device == AMPERE for tensor in tensors)  # type: ignore[union-attr]
    assert torch.cuda.current_device() == 0
    assert not any("sm90" in call.kernel for call in calls)
    check("out", out, tensors, **OPTIONS)


def test_tensors_of_two_devices_are_refused() -> None:
    query, key, value = inputs()
    with pytest.raises(fastattn.InputError, match="cuda:1"):
        fastattn.attention(query, key.to(AMPERE), value)


def test_backward_runs_in_autograds_own_thread_with_what_forward_chose() -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    with fastattn.use_backend("triton"):
        out = fastattn.attention(*tensors, **OPTIONS)
    with launches.recorded() as found:
        out.float().sum().backward()
    assert found and not any("sm90" in launch.report.kernel or "sm80" in launch.report.kernel for launch in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_side_stream(backend: str) -> None:
    tensors, stream = inputs(), torch.cuda.Stream()
    with torch.cuda.stream(stream), fastattn.use_backend(backend):
        out = fastattn.attention(*tensors, **OPTIONS)
    stream.synchronize()
    check("out", out, tensors, **OPTIONS)


@pytest.mark.refused
def test_a_stream_of_another_device_is_refused_by_the_driver() -> None:
    """The emulated driver checks it, so a launcher that takes the wrong stream cannot pass."""
    tensors = inputs(AMPERE)
    wrong = torch.cuda.Stream(HOPPER)
    with torch.cuda.device(AMPERE):
        from emulator.native import native

        with pytest.raises(RuntimeError, match="invalid resource handle"):
            launch_on(wrong.cuda_stream, tensors)
        assert any("a stream of device 0 while device 1" in text for text in native.runtime.take_failures())


def launch_on(stream: int, tensors: list[Tensor]) -> None:
    """Launches a Triton kernel on the stream with this handle."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at))

    from triton.runtime import driver

    before = driver.active.get_current_stream
    driver.active.get_current_stream = lambda device: stream  # type: ignore[assignment]
    try:
        copy[(1,)](tensors[0], torch.empty_like(tensors[0]), BLOCK=128)
    finally:
        driver.active.get_current_stream = before  # type: ignore[assignment]


def test_threads_call_at_the_same_time() -> None:
    problems = {device: inputs(device) for device in (HOPPER, AMPERE)}
    found: dict[torch.device, Tensor] = {}

    def call(device: torch.device) -> None:
        with torch.cuda.device(device):
            found[device] = fastattn.attention(*problems[device], **OPTIONS)

    threads = [threading.Thread(target=call, args=(device,)) for device in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device, tensors in problems.items():
        check(str(device), found[device], tensors, **OPTIONS)


def test_a_thread_without_a_context_calls() -> None:
    """A kernel for Hopper is the first CUDA work of a thread, as in autograd's own threads. torch's guard does nothing,
    because the device is already current, and its allocator reuses memory. Tensor maps need a context of the thread."""
    tensors, found = inputs(), []
    fastattn.attention(*tensors, **OPTIONS)
    thread = threading.Thread(target=lambda: found.append(fastattn.attention(*tensors, **OPTIONS)))
    thread.start()
    thread.join()
    check("out", found[0], tensors, **OPTIONS)


# --- CUDA graphs ---


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def warmed_up(function: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("warm", [True, False], ids=["warmed up", "first launch"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_in_a_graph(backend: str, warm: bool) -> None:
    """A replay over other inputs has the bits of a call. Nothing runs while the graph is captured."""
    # Each case has another head dim, so that "first launch" is one.
    dim = {"cuda": 32, "triton": 16}[backend] * (2 if warm else 1)
    tensors = [draw(1, 2, 48, dim, seed=i).requires_grad_() for i in range(3)]
    grad = draw(1, 2, 48, dim, seed=9)

    def step() -> tuple[Tensor, ...]:
        with fastattn.use_backend(backend):
            out = fastattn.attention(*tensors, causal=True, deterministic=True)
            return out, *torch.autograd.grad(out, tensors, grad)

    if warm:
        warmed_up(step)
    with launches.recorded() as found:
        graph, results = captured(step)
    assert not found
    for seed in (20, 30):
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor.copy_(draw(1, 2, 48, dim, seed=seed + i))
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert torch.equal(got, expected)


def test_dropout_in_a_graph_draws_other_masks_at_each_replay() -> None:
    tensors = [draw(1, 2, 64, 64, seed=i) for i in range(3)]
    graph, out = captured(lambda: fastattn.attention(*tensors, dropout_p=0.5))
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found) and not found[0].isnan().any()


def test_a_step_of_generation_in_a_graph() -> None:
    """Lengths are on the device and grow at each replay, as in a server's CUDA graphs."""
    batch, heads, dim, capacity = 2, 2, 64, 64
    k_cache, v_cache = (torch.zeros(batch, heads, capacity, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([5, 17], dtype=torch.int32, device="cuda")
    k_cache.copy_(draw(batch, heads, capacity, dim, seed=1))
    v_cache.copy_(draw(batch, heads, capacity, dim, seed=2))
    other_k, other_v, other_lengths = k_cache.clone(), v_cache.clone(), lengths.clone()
    step = [draw(batch, heads, 1, dim, seed=i) for i in (3, 4, 5)]

    def attend(keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        query, k_new, v_new = step
        out = fastattn.attention_with_kv_cache(query, keys, values, at, k_new=k_new, v_new=v_new)
        at.add_(1)
        return out

    graph, out = captured(lambda: attend(k_cache, v_cache, lengths))
    assert lengths.tolist() == [5, 17]
    for seed in range(10, 13):
        for i, tensor in enumerate(step):
            tensor.copy_(draw(batch, heads, 1, dim, seed=seed + i))
        graph.replay()
        assert torch.equal(out, attend(other_k, other_v, other_lengths))
    assert lengths.tolist() == [8, 20] and torch.equal(k_cache, other_k) and torch.equal(v_cache, other_v)


def test_a_captured_cache_counts_at_replays_and_does_not_move() -> None:
    """A graph writes to the addresses that it has captured. Memory that moved would belong to other tensors by then."""
    cache = fastattn.KVCache(1, 1, 2, 64, capacity=64, dtype=torch.bfloat16, device="cuda")
    step = [draw(1, 2, 1, 64, seed=i) for i in range(3)]
    prompt = [draw(1, 2, 70, 64, seed=i) for i in range(3)]
    with torch.no_grad():
        graph, _ = captured(lambda: cache.attend(0, *step))
        for _ in range(3):
            graph.replay()
            cache.note_replayed(1)
        assert cache.lengths() == [3]
        cache.reset()
        for grow in (lambda: cache.attend(0, *prompt), lambda: cache.reserve(65)):
            with pytest.raises(fastattn.CacheFull, match=r"no room for (70|65) tokens .* CUDA graph has captured"):
                grow()
        cache.attend(0, *(tensor[:, :, :63] for tensor in prompt))
        graph.replay()
        cache.note_replayed(1)
        with pytest.raises(fastattn.InputError, match="num_new: expected at most 0"):
            cache.note_replayed(1)
    assert cache.lengths() == [64]


@pytest.mark.refused
def test_synchronising_within_a_capture_ends_it() -> None:
    """The emulated runtime refuses what CUDA refuses."""
    tensors = inputs()
    with pytest.raises(RuntimeError, match=r"captur"):
        captured(lambda: fastattn.attention(*tensors).sum().item())
