"""Chooses the backend of a call, and can say why: the choice and the reason against every other backend."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn import native
from fastattn.checks import check_choice
from fastattn.dispatch.call import Call, Choice
from fastattn.dispatch.device import DeviceFacts, facts, when_emulation_changes
from fastattn.dispatch.recording import is_recording
from fastattn.dispatch.support import FEATURES, KERNEL_BACKENDS, SUPPORT, Support
from fastattn.dispatch.thread_state import Explained, thread
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError

_choices: dict[Any, Choice] = {}
_MOST_CHOICES_KEPT = 4096
_warned: set[str] = set()


@when_emulation_changes
def _forget_choices() -> None:
    _choices.clear()


def _torch_is_asked_for(call: Call) -> bool:
    """For attention inside ``torch.nn.attention.sdpa_kernel``, or where a backend of torch's SDPA was switched off."""
    c = torch._C
    return call.op != "int8_matmul" and not (
        c._get_flash_sdp_enabled() and c._get_mem_efficient_sdp_enabled() and c._get_math_sdp_enabled()
    )


def choose(call: Call) -> Choice:
    """The backend for ``call``. Raises ``InputError`` where a forced backend cannot run it."""
    forced = thread.forced
    if forward_ad._current_level >= 0 and call.only_torch is None:  # a kernel would drop the tangents silently
        call = call._replace(only_torch=_FORWARD_MODE)
    is_compiling = torch.compiler.is_compiling()
    # The decoding operator has no rule for vmap; a graph may serve many lengths.
    if is_compiling or torch._C._are_functorch_transforms_active():
        call = call._replace(may_decode=False)
    if is_compiling:  # tensors have no addresses to look at
        decided = _decide(call, forced, _torch_is_asked_for(call))
        if decided.detour is not None and _fallback_mode() == "error":
            raise InputError(_forbidden(decided.detour))
        return decided
    key = (call, forced, _torch_is_asked_for(call))
    is_hashable = True
    try:
        choice = _choices.get(key)
    except TypeError:  # a tracer's symbolic sizes cannot be hashed
        choice, is_hashable = None, False
    if choice is None:
        choice = _decide(*key)
        if len(_choices) >= _MOST_CHOICES_KEPT:
            _choices.clear()
        if is_hashable:
            _choices[key] = choice
    if thread.explaining:
        raise Explained(choice)
    if choice.detour is not None:
        _announce(choice.detour)
    return choice


def _fallback_mode() -> str:
    mode = os.environ.get("FASTATTN_FALLBACK", "warn")
    check_choice("FASTATTN_FALLBACK", mode, ("silent", "warn", "error"))
    return mode


def _forbidden(reason: str) -> str:
    return f"this call would run in PyTorch, and FASTATTN_FALLBACK=error forbids that: {reason}"


def _announce(reason: str) -> None:
    mode = _fallback_mode()
    if mode == "error":
        raise InputError(_forbidden(reason))
    if mode == "warn" and reason not in _warned:
        _warned.add(reason)
        warn_at_users_line(f"fastattn runs this call in PyTorch: {reason}", RuntimeWarning)


def _decide(call: Call, forced: str | None, torch_asked_for: bool) -> Choice:
    device_facts = facts(call.device)
    rejected: dict[str, str] = {}
    chosen = "torch"
    for backend in KERNEL_BACKENDS:
        reason = _reason_against(backend, call, device_facts)
        if reason is None and forced is not None and forced != backend:
            reason = f'use_backend("{forced}") is in force.'
        if reason is None and forced is None and torch_asked_for:
            reason = "a backend of torch's own attention is selected (torch.nn.attention.sdpa_kernel)."
        if reason is not None:
            rejected[backend] = reason
        elif chosen == "torch":
            chosen = backend
        else:
            rejected[backend] = f'"{chosen}" comes first; use_backend("{backend}") selects it.'
    if forced is not None and forced != chosen:
        raise InputError(f'use_backend("{forced}") cannot run this call: {rejected[forced]}')
    if chosen != "torch":
        assert device_facts is not None
        rejected["torch"] = "a kernel of fastattn runs this call."
        seen = _as_the_kernel_sees(call, SUPPORT[call.op][chosen])
        decoding = _as_decoding(chosen, seen, device_facts)
        prefilling = _as_prefilling(chosen, seen, device_facts)
        kernel, tile = _describe(chosen, decoding or prefilling or seen, device_facts)
        dims = seen.head_dim, seen.value_dim
        padded = dims if dims != (call.head_dim, call.value_dim) else None
        decodes, prefills = decoding is not None, prefilling is not None
        return Choice(chosen, kernel, tile, rejected, padded=padded, decodes=decodes, prefills=prefills)
    detour = None
    if device_facts is not None and forced is None and not torch_asked_for:
        detour = " ".join(dict.fromkeys(rejected.values()))
    return Choice("torch", "PyTorch", None, rejected, detour)


def _reason_against(backend: str, call: Call, device_facts: DeviceFacts | None) -> str | None:
    """Why ``backend`` cannot run ``call``: a sentence that a user can act on, or None."""
    if call.only_torch is not None:
        return call.only_torch
    if device_facts is None:
        return f"the tensors are on {call.device.type}, and the kernels need an NVIDIA GPU; move them to cuda."
    support = SUPPORT[call.op].get(backend)
    if support is None:
        return f"there is no {_NAMES[backend]} kernel for {call.op} yet."
    unavailable = _unavailable(backend, call.device, device_facts)
    if unavailable is not None:
        return unavailable
    if device_facts.arch < support.min_arch:
        return (
            f"the GPU has compute capability {device_facts.arch // 10}.{device_facts.arch % 10}, and the "
            f"{_NAMES[backend]} kernel needs {support.min_arch // 10}.{support.min_arch % 10} or later."
        )
    if call.dtype not in support.dtypes:
        takes = f"the {_NAMES[backend]} kernel takes {support.dtypes_text()}"
        return f"the dtype is {call.dtype}, and {takes}; cast or autocast."
    if backend == "cuda" and "int8 activations" in call.features:
        reason = _reason_against_int8_activations(call, device_facts)
        if reason is not None:
            return reason
    for name, dim in (("head dim", call.head_dim), ("value head dim", call.value_dim)):
        taken = support.kernel_head_dim(dim)
        if "paged" in call.features and taken is not None and taken != dim:
            return (
                f"the {name} is {dim}, and the {_NAMES[backend]} kernel takes {support.head_dims_text()}; pages are "
                "never copied, and hence not padded."
            )
        if taken is None:
            advice = "" if support.pads else "; pad with zeros and pass the original scale"
            return f"the {name} is {dim}, and the {_NAMES[backend]} kernel takes {support.head_dims_text()}{advice}."
    missing = [words for feature, words in FEATURES[call.op].items() if feature in call.features - support.features]
    if missing:
        return f"the {_NAMES[backend]} kernel does not have: {', '.join(missing)}."
    return None


# Of the CUDA C++ kernel that multiplies int8 numbers by int8 numbers, csrc/int8_matmul/gemm_s8_sm80.cuh.
_INT8_ACTIVATIONS_GO_WITH = frozenset({"gradients", "group scales", "bias", "activation", "residual"})
_MAX_INT8_SUM_DEPTH = 2**17
_MAX_INT8_LAUNCH_COUNT = 2**24


def _reason_against_int8_activations(call: Call, device_facts: DeviceFacts) -> str | None:
    """What that kernel does not take, and the one for 16-bit activations may."""
    tokens, rows, columns, _ = call.sizes
    others = call.features - _INT8_ACTIVATIONS_GO_WITH - {"int8 activations"}
    if others:
        words = ", ".join(words for feature, words in FEATURES[call.op].items() if feature in others)
        return f"the CUDA C++ kernel for int8 activations does not have: {words}."
    if rows % 8 != 0 or columns % 16 != 0:
        return (
            f"the weight is [{rows}, {columns}], and the CUDA C++ kernel for int8 activations takes N and K that are "
            "multiples of 8 and 16; pad it with zeros."
        )
    if columns > _MAX_INT8_SUM_DEPTH:
        return f"K is {columns}, and int32 holds sums of products of int8 numbers up to {_MAX_INT8_SUM_DEPTH}."
    if not torch.compiler.is_compiling():  # else sizes may be symbols, and the kernel's own check has to do
        gpu = device_facts.arch, device_facts.num_sms
        ctas = native.dealt_int8_matmul("int8_matmul_s8", *gpu, tokens, rows, columns).ctas
        if tokens + 2 * ctas >= _MAX_INT8_LAUNCH_COUNT:
            return (
                f"there are {tokens} tokens and {rows} outputs, too many for what the CUDA C++ kernel for int8 "
                "activations counts in a launch; call it for fewer tokens at a time."
            )
    return None


_FORWARD_MODE = (
    "forward-mode differentiation is under way (torch.func.jvp, forward_ad), and the kernels have gradients for "
    "backward mode only; PyTorch's math backend has both (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))."
)
_NAMES = {"cuda": "CUDA C++", "triton": "Triton"}
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None


def _unavailable(backend: str, device: torch.device, device_facts: DeviceFacts) -> str | None:
    if backend == "cuda":
        if device.type == "cpu" and not native.TAKES_CPU_TENSORS:
            return "the GPU is an emulated one, and the library was not built for the emulator."
        if "80" not in native.BUILD["archs"]:
            return (
                "the library was built without CUDA C++ kernels for sm_80; `python -m fastattn` says how to get them."
            )
        if device_facts.arch >= 80 and native.code_for(device_facts.arch) is None:
            return "the library was built for other GPUs; build fastattn with FASTATTN_ARCHS=native, or without it."
        major, minor = (int(part) for part in native.BUILD["cuda"].split("."))
        if device_facts.driver_cuda < 1000 * major + 10 * minor:
            supported = f"{device_facts.driver_cuda // 1000}.{device_facts.driver_cuda % 1000 // 10}"
            return (
                f"the driver supports CUDA {supported}, and the library was built with {major}.{minor}; update the "
                "driver, or build fastattn with an older CUDA toolkit."
            )
        return None
    if not _TRITON_IS_INSTALLED:
        return "triton is not installed; `pip install triton`."
    return None


def _as_the_kernel_sees(call: Call, support: Support) -> Call:
    """With the head dims of the kernel, which the call's are padded to."""
    head_dim, value_dim = (support.kernel_head_dim(dim) for dim in (call.head_dim, call.value_dim))
    assert head_dim is not None and value_dim is not None
    return call._replace(head_dim=head_dim, value_dim=value_dim)


# A tile of the attention kernels has 128 rows, and few CTAs would each walk over all of the keys. Predictions both: the
# number of queries is that of speculative decoding, and from so many keys on there is something to share out.
_FEW_QUERIES = 16
_MANY_KEYS = 1024
_DECODED = frozenset(FEATURES["attention"]) & frozenset(FEATURES["decode"])


def _as_decoding(backend: str, call: Call, device_facts: DeviceFacts) -> Call | None:
    """Attention with few queries over many keys as a call of the decoding kernel, or None where it is another case."""
    if call.op != "attention" or not call.may_decode or not call.features <= _DECODED:
        return None
    batch, heads, kv_heads, num_queries, num_keys = call.sizes
    if min(batch, heads) < 1 or not 1 <= num_queries <= _FEW_QUERIES or num_keys < _MANY_KEYS:
        return None
    rows = num_queries * (heads // kv_heads)
    decoding = call._replace(op="decode", sizes=(rows, call.dtype.itemsize, 0))
    return decoding if _reason_against(backend, decoding, device_facts) is None else None


def _as_prefilling(backend: str, call: Call, device_facts: DeviceFacts) -> Call | None:
    """Decoding with many queries as a call of the attention kernel over pages, or None where it is another case."""
    if call.op != "decode" or not call.may_prefill or "int8 cache" in call.features:
        return None
    features = call.features & FEATURES["attention"].keys() | {"varlen", "paged"}
    prefilling = call._replace(op="attention", features=features)
    return prefilling if _reason_against(backend, prefilling, device_facts) is None else None


def _describe(backend: str, call: Call, device_facts: DeviceFacts) -> tuple[str, Any]:
    """The kernel's name and its tile, for ``explain``."""
    tile: Any
    if backend == "cuda":
        if torch.compiler.is_compiling():  # nobody reads it there, and the graph would be one for a range of sizes
            return call.op, None
        kernel = _native_kernel(call, device_facts)
        return kernel, native.KERNELS.get(kernel)
    from fastattn.triton_kernels import tiles

    if call.op == "attention":
        return tiles.describe_attention(device_facts, call.head_dim, call.value_dim, call.features)
    if call.op == "decode":
        rows, itemsize, page_size = call.sizes
        return "decode.split_kernel", tiles.decode_tile(
            device_facts.arch,
            call.head_dim,
            call.value_dim,
            rows,
            itemsize,
            device_facts.shared_memory_bytes,
            page_size,
        )
    tile = tiles.int8_matmul_tile(
        device_facts.arch, *call.sizes, device_facts.shared_memory_bytes, device_facts.num_sms
    )
    return "int8_matmul.forward_kernel", tile


def _native_kernel(call: Call, device_facts: DeviceFacts) -> str:
    """The name of the CUDA C++ kernel that the library chooses."""
    features, arch, dtype = call.features, device_facts.arch, call.dtype
    widest = int(max(call.head_dim, call.value_dim))  # a tracer's may be a symbol, and becomes a number
    if call.op == "int8_matmul":
        op = "int8_matmul_s8" if "int8 activations" in features else "int8_matmul"
        tokens, outputs, depth = map(int, call.sizes[:3])
        name = native.int8_matmul_kernel(op, arch, device_facts.num_sms, dtype, tokens, outputs, depth)
    elif call.op == "decode":
        name = native.decode_kernel(arch, widest, dtype, "int8 cache" in features)
    else:
        name = native.attention_forward_kernel(
            arch,
            widest,
            dtype,
            causal="causal" in features,
            changes_scores=not features.isdisjoint(_CHANGES_SCORES),
            paged="paged" in features,
        )
    assert name is not None, f"the library has no kernel for {call}"
    return name


_CHANGES_SCORES = frozenset({"softcap", "alibi", "mask", "bias", "dropout"})


def only_torch_handles(*tensors: Tensor | None) -> str | None:
    """Why a tensor among these is for PyTorch alone (nested tensors, DTensor, other subclasses), or None."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        kind = type(tensor)
        is_plain = kind is Tensor or kind is torch.nn.Parameter or kind.__name__ in _TRACING_TENSORS
        if not is_plain or tensor.is_nested:
            name = kind.__name__ if not is_plain else "nested tensor"
            return f"an argument is a {name}, and the kernels take plain tensors; PyTorch handles such ones."
    return None


def is_watched() -> bool:
    """Whether this thread forces a backend, or somebody wants to know what runs: then every call must come by here."""
    return thread.forced is not None or thread.explaining or is_recording()


# What torch's own tracers hand to the functions they trace; the ops have shape functions for them.
_TRACING_TENSORS = frozenset({"FakeTensor", "FunctionalTensor", "Buffer"})
