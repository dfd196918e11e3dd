"""Tests DTensor on two processes: fastattn's functions, its operators with their sharding rules, and torch's context
parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastattn
import ranks
from cuda_kernels import HAS_KERNELS
from fastattn.call import AttentionCall
from fastattn.functional.distributed_tensors import are_split_alike
from fastattn.integrations import dtensor, torch_flash
from fastattn.integrations.torch_flash.switch import Overrides
from fastattn.ops.attention import attention_backward, attention_forward
from flash_formulas import flash_attention
from kernel_device import DEVICE

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def query_key_value(kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads = (HEADS, kv_heads, kv_heads)
    return [random(BATCH, h, 6 + (s > 0), DIM, seed=s, dtype=dtype) for s, h in enumerate(heads)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_function(
    function: Callable[..., Any],
    mesh: DeviceMesh,
    placements: list[Any],
    tensors: list[Tensor],
    options: dict[str, Any],
    wanted_placements: list[Any],
    near: dict[str, float],
    distribute_options: bool,
) -> None:
    """Compares results and gradients with one process's, for options that are plain tensors or DTensors."""
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    plain_options = {k: v.clone().requires_grad_() if k in ("bias", "sinks") else v for k, v in options.items()}
    spread = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in tensors]
    spread_options: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Tensor):
            value = distribute_tensor(value, mesh, [Replicate()]) if distribute_options else value.clone()
            value.requires_grad_(name in ("bias", "sinks"))
        spread_options[name] = value
    wanted = function(*plain, **plain_options)
    came = function(*spread, **spread_options)
    for ours, theirs in zip(came, wanted, strict=True):
        assert isinstance(ours, DTensor) and list(ours.placements) == wanted_placements[: len(ours.placements)]
        torch.testing.assert_close(ours.full_tensor(), theirs, **near)
    differentiable = [name for name in ("bias", "sinks") if name in options]
    grads = torch.autograd.grad(came[0].sum(), [*spread, *(spread_options[n] for n in differentiable)])
    wanted_grads = torch.autograd.grad(wanted[0].sum(), [*plain, *(plain_options[n] for n in differentiable)])
    torch.testing.assert_close(tuple(map(whole, grads)), wanted_grads, **near)


def attention(*tensors: Tensor, **options: Any) -> Any:
    return fastattn.attention(*tensors, return_lse=True, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, sinks": {"causal": True, "sinks": random(HEADS, seed=5)},
    "ALiBi": {"alibi_slopes": random(HEADS, seed=6).abs()},
    "ALiBi of each sequence": {"alibi_slopes": random(BATCH, HEADS, seed=6).abs(), "window": (3, 1)},
    "one bias": {"bias": random(1, 1, 6, 7, seed=7)},
    "bias of heads": {"bias": random(1, HEADS, 6, 7, seed=7)},
    "bias of all": {"bias": random(BATCH, HEADS, 6, 7, seed=7), "sinks": random(HEADS, seed=5)},
}


def check_attention(rank: int, mesh: DeviceMesh) -> None:
    for options in OPTIONS.values():
        for placement in (Shard(0), Shard(1), Replicate()):
            for distribute_options in (False, True):
                arguments = (query_key_value(), options, [placement], {}, distribute_options)
                with fastattn.use_backend("torch"):
                    check_function(attention, mesh, [placement], *arguments)  # type: ignore[arg-type]


def check_uneven_heads(rank: int, mesh: DeviceMesh) -> None:
    """One KV head cannot be split, so its query heads are not split either."""
    with fastattn.use_backend("torch"):
        query, key, value = query_key_value(kv_heads=1)
        spread = [distribute_tensor(query, mesh, [Shard(1)])]
        spread += [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (key, value)]
        out = fastattn.attention(*spread)
        assert out.placements == (Replicate(),)
        torch.testing.assert_close(out.full_tensor(), fastattn.attention(query, key, value))
        # Replicated keys with a split query: each rank takes its own heads.
        keys = query_key_value()[1:]
        out = fastattn.attention(spread[0], *(distribute_tensor(tensor, mesh, [Replicate()]) for tensor in keys))
        assert out.placements == (Shard(1),)
        torch.testing.assert_close(out.full_tensor(), fastattn.attention(query, *keys))


def check_largest_scores(rank: int, mesh: DeviceMesh) -> None:
    """Each rank has the scores of its heads, or of its batch entries, whose maximum is the whole's."""
    tensors = query_key_value()
    with fastattn.use_backend("torch"):
        out, wanted = fastattn.attention(*tensors, return_max_logit=True)
        for placement, of_result in ((Shard(0), Partial("max")), (Shard(1), Shard(0)), (Replicate(), Replicate())):
            spread = [distribute_tensor(tensor, mesh, [placement]) for tensor in tensors]
            for return_lse in (False, True):
                came = fastattn.attention(*spread, return_lse=return_lse, return_max_logit=True)
                assert came[-1].placements == (of_result,) and len(came) == 2 + return_lse
                torch.testing.assert_close(came[-1].full_tensor(), wanted)
                torch.testing.assert_close(came[0].full_tensor(), out)


def check_sizes_of_the_whole(rank: int, mesh: DeviceMesh) -> None:
    """Sizes that do not match are refused, even if each rank's shards match."""
    query, key, value = query_key_value()

    def spread(*tensors: Tensor, by: int) -> list[Tensor]:
        return [distribute_tensor(tensor, mesh, [Shard(by)]) for tensor in tensors]

    four = random(4, HEADS, 6, DIM)
    with fastattn.use_backend("torch"):
        with pytest.raises(fastattn.InputError, match="key: expected the query's batch size 4, got 2"):
            fastattn.attention(*spread(four, key, value, by=0))
        with pytest.raises(fastattn.InputError, match="bias: expected the query's batch size 4, got 2"):
            fastattn.attention(*spread(four, four, four, by=0), bias=random(2, 1, 6, 6))
        with pytest.raises(fastattn.InputError, match="sinks: expected the query's heads 4, got 2"):
            fastattn.attention(*spread(query, key, value, by=1), sinks=random(2))
    assert not are_split_alike(*spread(four, key, value, by=0), (), True)
    assert not are_split_alike(*spread(query, key, value, by=1), (), False)
    assert are_split_alike(*spread(query, key, value, by=1), (BATCH, 1, 6, 7), True)
    assert not are_split_alike(*spread(four, four, four, by=0), (2, 1, 6, 6), False)


def check_tensors_on_their_way(rank: int, mesh: DeviceMesh) -> None:
    """Tensors that are gathered asynchronously are waited for, and go to the kernels."""
    half = query_key_value(dtype=torch.float16)
    spread = [distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_() for tensor in half]
    for is_grad_enabled in (True, False):
        with torch.set_grad_enabled(is_grad_enabled), fastattn.use_backend("cuda"):
            out = fastattn.attention(*(tensor.redistribute(mesh, [Replicate()], async_op=True) for tensor in spread))
            torch.testing.assert_close(out.full_tensor(), fastattn.attention(*half), **NEAR)
            if is_grad_enabled:
                plain = [tensor.requires_grad_() for tensor in half]
                wanted = torch.autograd.grad(fastattn.attention(*plain).sum(), plain)
                torch.testing.assert_close(tuple(map(whole, torch.autograd.grad(out.sum(), spread))), wanted, **NEAR)


def check_varlen(rank: int, mesh: DeviceMesh) -> None:
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    tensors = [random(8, heads, DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]

    def varlen(*tensors: Tensor, **options: Any) -> Any:
        out, lse = fastattn.attention_varlen(*tensors, offsets, offsets, 5, 5, return_lse=True, **options)
        return out, lse.transpose(0, 1)

    with fastattn.use_backend("torch"):
        for placement in (Shard(1), Replicate()):
            options = {"causal": True, "sinks": random(HEADS, seed=5), "alibi_slopes": random(2, HEADS, seed=6)}
            check_function(varlen, mesh, [placement], tensors, options, [placement], {}, False)
        # Rows are not a batch: they are gathered.
        check_function(varlen, mesh, [Shard(0)], tensors, {}, [Replicate()], {}, False)


NEAR = {"rtol": 1e-2, "atol": 1e-2}


def check_drop_in(rank: int, mesh: DeviceMesh) -> None:
    """Kernels run where torch's function would; other shardings go to torch."""
    half = query_key_value(dtype=torch.float16)
    masks = (None, random(6, 7) > 0, random(BATCH, HEADS, 6, 7) > 0, random(BATCH, 1, 1, 7) > -1)
    for mask in masks:
        for placement in (Shard(0), Shard(1)):

            def drop_in(*tensors: Tensor) -> Any:
                return (fastattn.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True),)  # noqa: B023

            with fastattn.use_backend("cuda"), fastattn.record() as calls:
                check_function(drop_in, mesh, [placement], half, {}, [placement], NEAR, False)
            assert {call.backend for call in calls} == {"cuda"} and len(calls) == 4
    spread = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in [half[0]] * 3]
    with fastattn.use_backend("cuda"), pytest.raises(fastattn.InputError, match="an argument is a DTensor"):
        fastattn.scaled_dot_product_attention(*spread)


def check_operators(rank: int, mesh: DeviceMesh) -> None:
    """``torch.ops.fastattn.attention_forward`` and its backward take DTensors."""
    dtensor.register_sharding()
    dtensor.register_sharding()
    forward = torch.ops.fastattn.attention_forward.default
    backward = torch.ops.fastattn.attention_backward.default
    query, key, value = query_key_value(dtype=torch.float16)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, Shard(0)),
        ({}, Shard(1)),
        ({"window": (-1, 0), "alibi_slopes": random(1, HEADS, dtype=torch.float32).abs()}, Shard(0)),
        ({"sinks": random(HEADS, dtype=torch.float32), "bias": random(1, 1, 6, 7, dtype=torch.float16)}, Shard(0)),
        ({"sinks": random(HEADS, dtype=torch.float32), "bias": random(1, HEADS, 6, 7, dtype=torch.float16)}, Shard(1)),
    ]
    for options, placement in cases:
        call = AttentionCall(query, key, value, scale=0.25, return_max_logit=True, **options)
        arguments = attention_forward.Arguments(*attention_forward.arguments(call))
        out, lse, max_logit = forward(*arguments)
        spread = attention_forward.Arguments(
            *(
                distribute_tensor(a, mesh, [placement if index < 3 else Replicate()]) if isinstance(a, Tensor) else a
                for index, a in enumerate(arguments)
            )
        )
        local_out, local_lse, local_max = forward(*spread)
        assert local_out.placements == local_lse.placements == (placement,)
        torch.testing.assert_close(tuple(map(whole, (local_out, local_lse, local_max))), (out, lse, max_logit), **NEAR)

        def gradients(given: Any, *results: Tensor) -> Any:
            names = [name for name in attention_backward.Arguments._fields if name in given._fields]
            return backward(
                *attention_backward.Arguments(
                    grad_out=results[0],
                    grad_lse=results[1],
                    out=results[0],
                    lse=results[1],
                    deterministic=False,
                    bias_grad=given.bias is not None,
                    slopes_grad=given.alibi_slopes is not None,
                    **{name: getattr(given, name) for name in names},
                )
            )

        wanted = gradients(arguments, out, lse)
        came = gradients(spread, local_out, local_lse)
        assert {grad.placements for grad in came[:3]} == {(placement,)}
        torch.testing.assert_close(tuple(map(whole, came)), tuple(wanted), **NEAR)
    split_keys = torch.ops.fastattn.attention_split_keys.default
    sinks = random(HEADS, dtype=torch.float32)
    wanted = split_keys(query, key, value, None, sinks, 0.25, -1, 0, 0.0)
    for placement in (Shard(0), Shard(1)):
        spread_tensors = [distribute_tensor(tensor, mesh, [placement]) for tensor in (query, key, value)]
        spread_sinks = distribute_tensor(sinks, mesh, [Replicate()])
        came = split_keys(*spread_tensors, None, spread_sinks, 0.25, -1, 0, 0.0)
        for ours, theirs in zip(came, wanted, strict=True):
            assert ours.placements == (placement,)
            torch.testing.assert_close(ours.full_tensor(), theirs, **NEAR)
    # Two ranks cannot divide three KV heads: the rule offers no split of heads.
    spread_three = [distribute_tensor(random(1, h, 4, DIM, dtype=torch.float16), mesh, [Shard(1)]) for h in (12, 3, 3)]
    out, _, _ = forward(*attention_forward.arguments(AttentionCall(*spread_three, scale=0.25)))
    plain = [tensor.full_tensor() for tensor in spread_three]
    torch.testing.assert_close(
        out.full_tensor(), forward(*attention_forward.arguments(AttentionCall(*plain, scale=0.25)))[0], **NEAR
    )


def check_context_parallel(rank: int, mesh: DeviceMesh) -> None:
    """Our kernels compute the blocks of torch's ring over ``_scaled_dot_product_flash_attention``."""
    from torch.distributed.tensor.experimental import _attention as context_parallel

    aten = torch.ops.aten
    tensors = [random(1, 2, 16, DIM, seed=seed, dtype=torch.float16) for seed in range(4)]
    inputs = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    overrides = Overrides("CPU")
    balanced = context_parallel._cp_options.enable_load_balance
    context_parallel._cp_options.enable_load_balance = False
    context_parallel._enable_context_parallel_dispatcher()
    try:
        for is_causal in (False, True):
            wanted, _ = flash_attention(*(tensor.transpose(1, 2) for tensor in inputs), causal=is_causal)
            grads = torch.autograd.grad(wanted.transpose(1, 2), inputs, tensors[3].double())
            *spread, grad_out = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in tensors]
            for tensor in spread:
                tensor.requires_grad_()
            with fastattn.use_backend("cuda"), fastattn.record() as calls:
                out, *_ = aten._scaled_dot_product_flash_attention(*spread, 0.0, is_causal)
                came = torch.autograd.grad(out, spread, grad_out)
            assert len(calls) == (2 if is_causal and rank == 0 else 4)
            for ours, theirs in zip((out, *came), (wanted.transpose(1, 2), *grads), strict=True):
                torch.testing.assert_close(ours.full_tensor().double(), theirs, **NEAR)
    finally:
        context_parallel._disable_context_parallel_dispatcher()
        context_parallel._cp_options.enable_load_balance = balanced
        overrides.remove()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu" or not HAS_KERNELS, reason="two processes of the emulator, with kernels")
def test_ranks_compute_what_one_does() -> None:
    """One pair of processes runs all checks, as starting processes takes longer than the checks."""
    checks = [
        check_attention,
        check_uneven_heads,
        check_largest_scores,
        check_sizes_of_the_whole,
        check_tensors_on_their_way,
        check_varlen,
        check_drop_in,
        check_operators,
    ]
    if torch_flash.is_available():
        checks.append(check_context_parallel)
    ranks.run(__name__, *(check.__name__ for check in checks))
