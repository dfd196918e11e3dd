"""Tests decoding on CPU tensors against the oracle; its cost must depend on the tokens, not on the capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from by_hand import normal
from decode_cases import CASES, SCENARIOS, Case, check, clone, make_arguments, same_bits_alone
from fastattn import reference
from fastattn.call import DecodeCall
from fastattn.functional import cache_on_cpu, composite, torch_sdpa

pytestmark = pytest.mark.quick


def moved_to_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def run(case: Case, arguments: dict[str, Any], return_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Calls the function below the public one, which refuses lengths out of range."""
    on_cpu = moved_to_cpu(arguments)
    options = {name: on_cpu.pop(name) for name in ("rotary_interleaved", "softcap", "scale")}
    window = (case.window[0], 0 if case.causal else case.window[1])
    call = DecodeCall(**on_cpu, **options, window=window, return_lse=return_lse, batch_invariant=case.batch_invariant)
    found = cache_on_cpu.attention_with_kv_cache(call)
    if found is None:
        assert 0 in (*on_cpu["query"].shape, *on_cpu["k_cache"].shape), "only where there is nothing"
        found = reference.attention_with_kv_cache(**on_cpu, **options, causal=False, window=window)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if isinstance(arguments[name], Tensor) and arguments[name] is not on_cpu[name]:
            arguments[name].copy_(on_cpu[name])
    return found


def run_for_output_alone(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Computes the output by PyTorch's own attention where that can, and the lse by another call, over a copy."""
    _, lse = run(case, clone(arguments))
    return run(case, arguments, return_lse=False)[0], lse


RUNS = {"with lse": run, "output alone": run_for_output_alone}
each_run = pytest.mark.parametrize("how", RUNS.values(), ids=RUNS.keys())


@each_run
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_meets_the_oracle(case: Case, how: Callable[..., tuple[Tensor, Tensor]]) -> None:
    check(case, how)


@each_run
@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("views are")])  # for kernels only
def test_every_scenario(name: str, how: Callable[..., tuple[Tensor, Tensor]]) -> None:
    SCENARIOS[name](how)


@each_run
@pytest.mark.parametrize("changes", [{}, {"queries": 3, "dtype": torch.bfloat16}, {"softcap": 5.0}], ids=str)
def test_batch_invariance(changes: dict[str, Any], how: Callable[..., tuple[Tensor, Tensor]]) -> None:
    same_bits_alone(Case("alone", lengths=(37, 37, 130, 0, 37), batch_invariant=True, dims=(64, 64), **changes), how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 5, 70])
def test_a_key_of_nan_is_seen(length: int, dtype: torch.dtype) -> None:
    """PyTorch's kernel treats such a key's score as a number."""
    query, key, value = (normal(seed, 1, 2, 100, 16, dtype=dtype) for seed in range(3))
    key[0, 0, length - 1, 3] = math.nan
    out = fastattn.attention_with_kv_cache(query[:, :, :1], key, value, torch.tensor([length], dtype=torch.int32))
    assert bool(out[0, 0].isnan().all()) and bool(out[0, 1].isfinite().all())


# --- What it costs ----------------------------------------------------------------------------------------------------


class Touched(TorchDispatchMode):
    """Counts the elements that operators read and write; gathers and scatters count only what they move."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            gathers = function.overloadpacket.__name__ in ("gather", "index", "index_select", "index_put_")
            counted = [*args[1:], *(() if function._schema.is_mutable else [result])] if gathers else [*args, result]
            self.elements += sum(
                tensor.numel() for tensor in torch.utils._pytree.tree_leaves(counted) if isinstance(tensor, Tensor)
            )
        return result


LENGTHS = torch.tensor([40, 3, 40], dtype=torch.int32)


def elements_touched(capacity: int, monkeypatch: pytest.MonkeyPatch, paged: bool, new: int, **changes: Any) -> int:
    batch, kv_heads, dim, page_size = len(LENGTHS), 2, 16, 8
    kind = changes.pop("kind", torch.float32)
    key, value = (normal(seed, batch, kv_heads, capacity, dim, dtype=torch.float32) for seed in (1, 2))
    arguments: dict[str, Any] = {"k_cache": key, "v_cache": value, **changes}
    if kind != torch.float32:
        quantize = reference.quantize_rows if kind == torch.int8 else reference.quantize_rows_fp8
        (key, k_scale), (value, v_scale) = quantize(key), quantize(value)
        arguments |= {"k_cache": key, "v_cache": value, "k_scale": k_scale, "v_scale": v_scale}
    if paged:
        pages = capacity // page_size
        for name in arguments.keys() & {"k_cache", "v_cache", "k_scale", "v_scale"}:
            of_tokens = arguments[name].unflatten(2, (pages, page_size))
            arguments[name] = of_tokens.transpose(1, 2).flatten(0, 1).contiguous()
        arguments["block_table"] = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    if new:
        arguments |= {f"{name}_new": normal(3, batch, kv_heads, new, dim, dtype=torch.float32) for name in "kv"}
    query = normal(4, batch, 4, max(new, 1), dim, dtype=torch.float32)
    for module in (cache_on_cpu, composite, torch_sdpa):  # under a dispatch mode, the host usually may not read lengths
        monkeypatch.setattr(module, "is_readable", lambda *_: True)
    with Touched() as touched:
        fastattn.attention_with_kv_cache(query, cache_seqlens=LENGTHS, **arguments)
    return touched.elements


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softcap": 5.0},
        {"return_lse": True},
        {"window": (9, 0)},
        {"kind": torch.int8},
        {"kind": torch.float8_e4m3fn},
    ],
    ids=str,
)
def test_the_work_does_not_grow_with_the_capacity(
    changes: dict[str, Any], new: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (elements_touched(capacity, monkeypatch, paged, new, **changes) for capacity in (48, 4800))
    assert 0 < small == large


def test_a_window_costs_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it, within = (elements_touched(48, monkeypatch, False, 0, window=(left, 0)) for left in (-1, 4))
    assert within < all_of_it / 3


def test_appending_to_slots_does_not_grow_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_on_cpu, "is_readable", lambda *_: True)
    found = []
    for pages in (3, 300):
        caches = [torch.zeros(pages, 2, 8, 16) for _ in range(2)]
        with Touched() as touched:
            fastattn.append_to_cache(*torch.ones(2, 3, 2, 16), *caches, torch.tensor([17, -1, 4]))
        assert all(int(cache.sum()) == 2 * 2 * 16 for cache in caches)
        found.append(touched.elements)
    assert 0 < found[0] == found[1]


@pytest.mark.parametrize("what", ["compiled", "watched"])
def test_nobody_reads_lengths_where_they_are_traced_or_watched(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a graph would contain the lengths as constants."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert function is not torch.ops.aten._local_scalar_dense.default, "a value was read"
            return function(*args, **(kwargs or {}))

    case = Case("traced", lengths=(5, 9), capacity=12, new=1, dtype=torch.float32)
    arguments = moved_to_cpu(make_arguments(case))
    expected = fastattn.attention_with_kv_cache(**clone(arguments))
    if what == "watched":
        with Watching():
            found = fastattn.attention_with_kv_cache(**clone(arguments))
    else:
        compiled = torch.compile(fastattn.attention_with_kv_cache, fullgraph=True, backend="aot_eager")
        compiled(**{**clone(arguments), "cache_seqlens": torch.tensor([0, 0], dtype=torch.int32)})
        found = compiled(**clone(arguments))
    torch.testing.assert_close(found, expected)
