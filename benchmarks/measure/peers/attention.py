"""Prepares other libraries' attention over whole sequences, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure.cases.attention import AttentionCase, AttentionInputs, offsets
from benchmarks.measure.implementations import (
    Implementation,
    Prepared,
    first,
    importable,
    require,
    torch_version,
    version_of,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Built(NamedTuple):
    """A peer's function for a case. ``bring`` converts fastattn's layout to the peer's, ``take_back`` converts back."""

    attend: Attend
    bring: Callable[[Tensor], Tensor]
    take_back: Callable[[Tensor], Tensor]


Build = Callable[[AttentionCase, AttentionInputs], Built]


def _forward(build: Build) -> Callable[[AttentionCase, AttentionInputs], Prepared]:
    def prepare(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
        built = build(case, inputs)
        tensors = [built.bring(t) for t in (inputs.query, inputs.key, inputs.value)]
        return Prepared(lambda: built.attend(*tensors), lambda out: (built.take_back(out),))

    return prepare


def _backward(build: Build) -> Callable[[AttentionCase, AttentionInputs], Prepared]:
    def prepare(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
        built = build(case, inputs)
        leaves = [built.bring(t).detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
        out = built.attend(*leaves)
        grad_out = built.bring(inputs.grad_out)
        return Prepared(
            lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
            lambda grads: tuple(built.take_back(grad) for grad in grads),
        )

    return prepare


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _heads_last(tensor: Tensor) -> Tensor:
    """Converts ``[B, H, S, D]`` to contiguous ``[B, S, H, D]`` and back. Packed sequences have that order already."""
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 4 else tensor


# --- torch ---------------------------------------------------------------------------------------------------------


def _sdpa(case: AttentionCase, inputs: AttentionInputs) -> Built:
    require(not case.varlen, "packed sequences")
    require(case.window < 0, "window but as a mask in memory")
    grouped = case.heads != case.kv_heads
    mask: Any = inputs.bias
    is_causal = case.causal
    if is_causal and case.queries:  # PyTorch's `is_causal` aligns the mask to the top left
        takes_it = torch.backends.cuda.flash_sdp_enabled() or (
            torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped
        )
        require(takes_it and mask is None, "causal mask that ends with the keys but as a mask in memory")
        mask, is_causal = causal_lower_right(case.queries, case.seqlen), False

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
        )

    return Built(attend, _as_it_is, _as_it_is)


def _flex(case: AttentionCase, inputs: AttentionInputs) -> Built:
    require(not case.varlen, "packed sequences but as a mask over all of them")
    block_mask = _block_mask(case, inputs.query.device)
    bias = inputs.bias

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[0, head, row, column]

    compiled = compiled_flex_attention()
    score_mod = None if bias is None else add_bias
    grouped = case.heads != case.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = compiled(query, key, value, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)
        return out

    return Built(attend, _as_it_is, _as_it_is)


@functools.lru_cache(maxsize=1)  # all sets of inputs of one case share the mask
def _block_mask(case: AttentionCase, device: torch.device) -> Any:
    if not case.causal and case.window < 0:
        return None
    reach = case.window if case.window >= 0 else case.seqlen
    keys_before = case.seqlen - case.longest_queries

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        own = row + keys_before
        return (column <= own) & (column >= own - reach)

    return create_block_mask(is_visible, None, None, case.longest_queries, case.seqlen, device=str(device))


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Returns FlexAttention compiled, as its users run it. It is compiled again for the shape of every case."""
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    # A donated buffer is gone after one backward pass, and here the same graph runs backward many times.
    functorch_config.donated_buffer = False
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


# --- flash-attn ----------------------------------------------------------------------------------------------------


def _flash_attn_2(case: AttentionCase, inputs: AttentionInputs) -> Built:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return _flash(case, inputs, flash_attn_func, flash_attn_varlen_func, unbounded=-1)


def _flash_attn_3(case: AttentionCase, inputs: AttentionInputs) -> Built:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _flash(case, inputs, flash_attn_func, flash_attn_varlen_func, unbounded=-1)


def _flash_attn_4(case: AttentionCase, inputs: AttentionInputs) -> Built:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return _flash(case, inputs, flash_attn_func, flash_attn_varlen_func, unbounded=None)


def _flash(case: AttentionCase, inputs: AttentionInputs, dense: Any, varlen: Any, unbounded: int | None) -> Built:
    """Prepares one of flash-attn's three generations, which only differ in the value ``unbounded`` for no window."""
    require(not case.bias, "additive bias")
    window = (case.window, 0) if case.window >= 0 else (unbounded, unbounded)
    options = {"causal": case.causal, "window_size": window}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not case.varlen:
            out: Tensor = first(dense(query, key, value, **options))
        else:
            out = first(
                varlen(
                    query,
                    key,
                    value,
                    cu_seqlens_q=inputs.cu_seqlens_q,
                    cu_seqlens_k=inputs.cu_seqlens_k,
                    max_seqlen_q=case.longest_queries,
                    max_seqlen_k=case.seqlen,
                    **options,
                )
            )
        return out

    return Built(attend, _heads_last, _heads_last)


# --- flashinfer (forward only) -------------------------------------------------------------------------------------


@functools.cache
def flashinfer_workspace(device: torch.device) -> Tensor:
    """Returns the scratch memory that flashinfer's wrappers share, as their calls run one after the other."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)


def _flashinfer_single(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    import flashinfer

    require(case.batch == 1 and not case.varlen, "batch in this function")
    require(not case.bias, "additive bias")
    query, key, value = (_heads_last(t)[0] for t in (inputs.query, inputs.key, inputs.value))
    options = {"causal": case.causal or case.window >= 0, "window_left": case.window}
    return Prepared(
        lambda: flashinfer.single_prefill_with_kv_cache(query, key, value, **options),
        lambda out: (out.transpose(0, 1)[None],),
    )


def _flashinfer_batch(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    import flashinfer

    require(not case.bias, "additive bias")
    device = inputs.query.device
    query, key, value = (
        t if case.varlen else _heads_last(t).flatten(0, 1) for t in (inputs.query, inputs.key, inputs.value)
    )
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(flashinfer_workspace(device), "NHD")
    wrapper.plan(
        offsets(case.query_lengths, device),
        offsets(case.lengths, device),
        case.heads,
        case.kv_heads,
        case.head_dim,
        causal=case.causal or case.window >= 0,
        window_left=case.window,
        q_data_type=case.torch_dtype,
    )

    def outputs(out: Tensor) -> tuple[Tensor]:
        if case.varlen:
            return (out,)
        return (out.unflatten(0, (case.batch, case.longest_queries)).transpose(1, 2),)

    return Prepared(lambda: wrapper.run(query, key, value), outputs)


# --- xformers ------------------------------------------------------------------------------------------------------


def _xformers(case: AttentionCase, inputs: AttentionInputs) -> Built:
    from xformers import ops
    from xformers.ops.fmha import attn_bias

    group = case.heads // case.kv_heads
    require(not case.bias or group == 1, "additive bias with grouped heads")
    require(not case.varlen or case.window < 0, "window over packed sequences")
    mask: Any = None
    if case.varlen:
        mask = attn_bias.BlockDiagonalMask.from_seqlens(list(case.query_lengths), list(case.lengths))
        mask = mask.make_causal_from_bottomright() if case.causal else mask
    elif case.window >= 0:
        mask = attn_bias.LocalAttentionFromBottomRightMask(window_left=case.window, window_right=0)
    elif case.causal:
        mask = attn_bias.LowerTriangularFromBottomRightMask()
    elif inputs.bias is not None:
        mask = inputs.bias.expand(case.batch, -1, -1, -1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if group > 1:  # [B, S, Hkv, group, D]
            query = query.unflatten(2, (case.kv_heads, group))
            key, value = (t[:, :, :, None].expand(-1, -1, -1, group, -1) for t in (key, value))
        out: Tensor = ops.memory_efficient_attention(query, key, value, attn_bias=mask)
        return out.flatten(2, 3) if group > 1 else out

    def bring(tensor: Tensor) -> Tensor:
        return tensor[None] if case.varlen else _heads_last(tensor)

    def take_back(tensor: Tensor) -> Tensor:
        return tensor[0] if case.varlen else _heads_last(tensor)

    return Built(attend, bring, take_back)


# --- who is here ---------------------------------------------------------------------------------------------------


def sdpa_contexts() -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Returns, by name, contexts that force torch's own attention to each of its backends."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return {f"torch SDPA {name}": functools.partial(sdpa_kernel, backend) for name, backend in backends.items()}


def _builders() -> list[tuple[str, str, Build]]:
    found: list[tuple[str, str, Build]] = [("FlexAttention, compiled", torch_version(), _flex)]
    if importable("flash_attn.flash_attn_interface"):
        found.append(("flash-attn 2", version_of("flash-attn"), _flash_attn_2))
    if importable("flash_attn_interface"):
        found.append(("flash-attn 3", version_of("flash-attn-3", "flash_attn_3"), _flash_attn_3))
    if importable("flash_attn.cute"):
        found.append(("flash-attn 4", version_of("flash-attn-4", "fa4"), _flash_attn_4))
    if importable("xformers.ops"):
        found.append(("xformers", version_of("xformers"), _xformers))
    return found


def forward_peers() -> list[Implementation]:
    """Returns every peer that can be imported."""
    version = torch_version()
    peers = [Implementation(name, version, _forward(_sdpa), context) for name, context in sdpa_contexts().items()]
    peers += [Implementation(name, version, _forward(build)) for name, version, build in _builders()]
    if importable("flashinfer"):
        version = version_of("flashinfer-python", "flashinfer")
        peers.append(Implementation("flashinfer batch prefill", version, _flashinfer_batch))
        peers.append(Implementation("flashinfer single prefill", version, _flashinfer_single))
    return peers


def backward_peers() -> list[Implementation]:
    """Returns every peer that can be imported and has a backward pass."""
    version = torch_version()
    peers = [Implementation(name, version, _backward(_sdpa), context) for name, context in sdpa_contexts().items()]
    return peers + [Implementation(name, version, _backward(build)) for name, version, build in _builders()]
