"""Prepares other libraries' attention over whole sequences, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure.cases.attention import AttentionCase, AttentionInputs, offsets
from benchmarks.measure.cases.masks import mask_mod
from benchmarks.measure.implementations import (
    Implementation,
    Prepare,
    Prepared,
    first,
    installed,
    require,
    torch_version,
)

NO_RANGES = "mask of ranges of keys but as one in memory"


class Built(NamedTuple):
    """Holds a peer's function for a case. ``bring`` converts to the peer's layout, ``take_back`` back to fastattn's."""

    attend: Callable[..., Tensor]
    bring: Callable[[Tensor], Tensor] = lambda tensor: tensor
    take_back: Callable[[Tensor], Tensor] = lambda tensor: tensor


Build = Callable[[AttentionCase, AttentionInputs], Built]


def _forward(build: Build) -> Prepare:
    def prepare(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
        built = build(case, inputs)
        tensors = [built.bring(t) for t in (inputs.query, inputs.key, inputs.value)]
        return Prepared(lambda: built.attend(*tensors), lambda out: (built.take_back(out),))

    return prepare


def _backward(build: Build) -> Prepare:
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


def _heads_last(tensor: Tensor) -> Tensor:
    """Swaps heads and sequence: ``[B, H, S, D]`` to contiguous ``[B, S, H, D]``, or back. Packed tensors stay as is."""
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 4 else tensor


# --- torch ---------------------------------------------------------------------------------------------------------


def _sdpa(case: AttentionCase, inputs: AttentionInputs) -> Built:
    require(not case.varlen, "packed sequences")
    require(not case.mask, NO_RANGES)
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

    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    return Built(attend)


def _flex(case: AttentionCase, inputs: AttentionInputs) -> Built:
    require(not case.varlen, "packed sequences but as a mask over all of them")
    block_mask = _block_mask(case, inputs.query.device)
    bias = inputs.bias

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[0, head, row, column]

    score_mod = None if bias is None else add_bias
    grouped = case.heads != case.kv_heads
    attend = partial(compiled_flex_attention(), score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)
    return Built(attend)


@functools.lru_cache(maxsize=1)  # all sets of inputs of one case share the mask
def _block_mask(case: AttentionCase, device: torch.device) -> Any:
    if case.mask:
        visible = mask_mod(case.mask, case.seqlen, device)
        return create_block_mask(visible, None, None, case.seqlen, case.seqlen, device=str(device))
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
    return torch.compile(flex_attention, dynamic=False)


# --- flash-attn ----------------------------------------------------------------------------------------------------


def _flash(case: AttentionCase, inputs: AttentionInputs, module: str, unbounded: int | None) -> Built:
    """Prepares a version of flash-attn. Versions differ in their module and in ``unbounded``, which means no window."""
    require(not case.bias, "additive bias")
    require(not case.mask, NO_RANGES)
    flash_attn = importlib.import_module(module)
    function = flash_attn.flash_attn_func
    window = (case.window, 0) if case.window >= 0 else (unbounded, unbounded)
    options: dict[str, Any] = {"causal": case.causal, "window_size": window}
    if case.varlen:
        function = flash_attn.flash_attn_varlen_func
        options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        options |= {"max_seqlen_q": case.longest_queries, "max_seqlen_k": case.seqlen}
    return Built(lambda *tensors: first(function(*tensors, **options)), _heads_last, _heads_last)


_flash_attn_2 = partial(_flash, module="flash_attn", unbounded=-1)
_flash_attn_3 = partial(_flash, module="flash_attn_interface", unbounded=-1)
_flash_attn_4 = partial(_flash, module="flash_attn.cute", unbounded=None)


# --- flashinfer (forward only) -------------------------------------------------------------------------------------


@functools.cache
def flashinfer_workspace(device: torch.device) -> Tensor:
    """Returns the scratch memory that flashinfer's wrappers share: their calls run one after the other."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)


def _flashinfer_single(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    import flashinfer

    require(case.batch == 1 and not case.varlen, "batch in this function")
    require(not case.bias, "additive bias")
    require(not case.mask, NO_RANGES)
    query, key, value = (_heads_last(t)[0] for t in (inputs.query, inputs.key, inputs.value))
    options = {"causal": case.causal or case.window >= 0, "window_left": case.window}
    return Prepared(
        lambda: flashinfer.single_prefill_with_kv_cache(query, key, value, **options),
        lambda out: (out.transpose(0, 1)[None],),
    )


def _flashinfer_batch(case: AttentionCase, inputs: AttentionInputs) -> Prepared:
    import flashinfer

    require(not case.bias, "additive bias")
    require(not case.mask, NO_RANGES)
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
    require(not case.mask, NO_RANGES)
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


# --- importable peers ----------------------------------------------------------------------------------------------


def sdpa_contexts() -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Returns, by name, contexts that force torch's own attention to each of its backends."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return {f"torch SDPA {name}": partial(sdpa_kernel, backend) for name, backend in backends.items()}


def torch_peers(sdpa: Prepare, flex: Prepare) -> list[Implementation]:
    """Returns torch's SDPA with each of its backends, prepared by ``sdpa``, and FlexAttention, prepared by ``flex``."""
    version = torch_version()
    peers = [Implementation(name, version, sdpa, context) for name, context in sdpa_contexts().items()]
    return [*peers, Implementation("FlexAttention, compiled", version, flex)]


def _peers_of_both_passes(prepared: Callable[[Build], Prepare]) -> list[Implementation]:
    packages: list[tuple[str, str, tuple[str, ...], Build]] = [
        ("flash-attn 2", "flash_attn.flash_attn_interface", ("flash-attn",), _flash_attn_2),
        ("flash-attn 3", "flash_attn_interface", ("flash-attn-3",), _flash_attn_3),
        ("flash-attn 4", "flash_attn.cute", ("flash-attn-4", "fa4"), _flash_attn_4),
        ("xformers", "xformers.ops", ("xformers",), _xformers),
    ]
    return torch_peers(prepared(_sdpa), prepared(_flex)) + installed(
        (name, module, distributions, prepared(build)) for name, module, distributions, build in packages
    )


def forward_peers() -> list[Implementation]:
    """Returns every peer that can be imported."""
    flashinfer = ("flashinfer", ("flashinfer-python", "flashinfer"))
    return _peers_of_both_passes(_forward) + installed(
        [
            ("flashinfer batch prefill", *flashinfer, _flashinfer_batch),
            ("flashinfer single prefill", *flashinfer, _flashinfer_single),
        ]
    )


def backward_peers() -> list[Implementation]:
    """Returns every peer that can be imported and has a backward pass."""
    return _peers_of_both_passes(_backward)
