"""Tests caches that are views of one tensor, as servers keep them: kernels read and write them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import EMULATED, HAS_KERNELS, checked
from decode_cases import Case, clone, make_arguments, run_public
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:
    from emulator import device

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

CACHES, SCALES = ("k_cache", "v_cache"), ("k_scale", "v_scale")


def in_one_row(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns [blocks, Hkv, rows, D + Dv] and its views of keys and values."""
    kv = torch.cat([k, v], -1)
    return kv, kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]


def in_one_row_with_heads_after_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns [blocks, rows, Hkv, D + Dv] and its views of keys and values."""
    kv, _, _ = in_one_row(k.transpose(1, 2), v.transpose(1, 2))
    return kv, *(part.transpose(1, 2) for part in (kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]))


def one_after_the_other(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns [2, blocks, Hkv, rows, D] and its views of keys and values."""
    kv = torch.stack([k, v])
    return kv, kv[0], kv[1]


def pair_of_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns [blocks, 2, rows, Hkv, D] and its views of keys and values."""
    kv = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 1)
    return kv, kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)


LAYOUTS = [in_one_row, in_one_row_with_heads_after_rows, one_after_the_other, pair_of_pages]
SIZES: dict[str, Any] = {"dims": (64, 64), "heads": (4, 2), "rotary_dim": 16}
CASES = [
    Case("contiguous", new=1, **SIZES),
    Case("split-pages", new=2, queries=2, page_size=16, capacity=160, splits=3, **SIZES),
    Case("odd-pages", new=2, queries=2, page_size=5, capacity=150, dtype=torch.bfloat16, **SIZES),
    Case("int8", new=2, queries=2, int8=True, **SIZES),
    Case("int8-pages", new=1, page_size=16, capacity=160, int8=True, splits=2, **SIZES),
    Case("prompt", queries=70, new=70, lengths=(0, 31), capacity=128, page_size=16, **SIZES),
    Case("prompt-contiguous", queries=66, new=66, lengths=(3, 40), capacity=128, **SIZES),
]


def check(case: Case, layout: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str:
    """Checks that outputs and caches have the bits of a call with separate caches. Returns the kernel's name."""
    alone = make_arguments(case)
    together = clone(alone)
    kv, together["k_cache"], together["v_cache"] = layout(alone["k_cache"], alone["v_cache"])
    assert {together[name].untyped_storage().data_ptr() for name in CACHES} == {kv.untyped_storage().data_ptr()}
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    with fastattn.record() as calls:
        out, lse = run_public(case, together)
    if DEVICE == "cuda":  # only the results remain, and no copy of the cache was made
        assert torch.cuda.memory_allocated() - before <= 2 * (out.nbytes + lse.nbytes) + 8192
    expected, expected_lse = run_public(case, alone)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    wanted, _, _ = layout(alone["k_cache"], alone["v_cache"])
    torch.testing.assert_close(kv, wanted, rtol=0, atol=0, equal_nan=True)
    for name in SCALES:
        if alone[name] is not None:
            torch.testing.assert_close(together[name], alone[name], rtol=0, atol=0, equal_nan=True)
    return calls[0].kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    in_turn([(case,) for case in CASES], LAYOUTS, each=2),
    ids=lambda value: value.name if isinstance(value, Case) else value.__name__,
)
def test_views_of_one_tensor(case: Case, layout: Callable[..., Any], backend: str) -> None:
    kernel = check(case, layout)
    if backend == "cuda":
        assert kernel.startswith("attention_forward" if case.name.startswith("prompt") else "decode_split")


@pytest.mark.slow
@pytest.mark.skipif(not EMULATED or not HAS_KERNELS, reason="chooses the emulated GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", (16, 64))
def test_prompts_on_hopper(layout: Callable[..., Any], page_size: int) -> None:
    """Hopper's kernel copies large pages by TMA, and others row by row."""
    case = Case("prompt", queries=70, new=70, lengths=(0, 31), capacity=128, page_size=page_size, **SIZES)
    with device.emulated(arch=90, num_sms=2), fastattn.use_backend("cuda"), checked():
        assert check(case, layout).startswith("attention_forward_sm90")


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["arguments", "inside"])
def test_compile(inside: bool, backend: str) -> None:
    """The views are arguments of the graph, or made inside of it."""
    dtype = torch.float32 if backend == "torch" else torch.float16
    case = Case("compiled", new=2, queries=2, page_size=16, capacity=160, dtype=dtype, **SIZES)
    arguments = {name: value for name, value in make_arguments(case).items() if value is not None}
    kv, _, _ = in_one_row(arguments.pop("k_cache"), arguments.pop("v_cache"))
    dim = case.dims[0]

    def step(kv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
        if inside:
            k_cache, v_cache = kv[..., :dim], kv[..., dim:]
        new = torch.ones(1, kv.shape[1], dim, dtype=kv.dtype, device=kv.device)
        slots = torch.zeros(1, dtype=torch.int64, device=kv.device)
        fastattn.append_to_cache(new, new, k_cache, v_cache, slots)
        return fastattn.attention_with_kv_cache(**arguments, k_cache=k_cache, v_cache=v_cache)

    torch._dynamo.reset()
    mine, expected = kv.clone(), kv.clone()
    wanted = step(expected, expected[..., :dim], expected[..., dim:])
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(mine, mine[..., :dim], mine[..., dim:])
    # In a graph on a CPU, PyTorch's operators get the whole capacity, which rounds differently.
    torch.testing.assert_close(out, wanted, **({} if backend == "torch" else {"rtol": 0, "atol": 0}))
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


def test_int8_rows_side_by_side_need_whole_vectors(backend: str) -> None:
    """The values begin 8 bytes into a vector of 16: PyTorch takes them, the kernels' error says what they need."""
    case = Case("int8", int8=True, dims=(24, 24), heads=(2, 2))
    arguments = make_arguments(case)
    _, arguments["k_cache"], arguments["v_cache"] = in_one_row(arguments["k_cache"], arguments["v_cache"])
    if backend == "torch":
        run_public(case, arguments)
        return
    with pytest.raises(fastattn.InputError, match=r"v_cache: expected .* multiples of 16 bytes.*16-byte aligned"):
        run_public(case, arguments)
