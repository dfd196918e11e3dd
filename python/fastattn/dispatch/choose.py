"""Chooses the backend of a call, and with it the kernel; reasons.py says why not another."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import forward_ad

from fastattn import native
from fastattn.activations import GATED
from fastattn.checks import check_choice
from fastattn.dispatch import reasons
from fastattn.dispatch.call import Call, Choice
from fastattn.dispatch.device import DeviceFacts, facts, when_emulation_changes
from fastattn.dispatch.reasons import lacking_for_cuda, reason_against
from fastattn.dispatch.recording import is_recording
from fastattn.dispatch.support import CHANGES_SCORES, FEATURES, KERNEL_BACKENDS, SUPPORT, Support
from fastattn.dispatch.thread_state import Explained, NoKernel, asked, thread
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError

_choices: dict[Any, Choice] = {}
_MOST_CHOICES_KEPT = 4096
_warned: set[str] = set()


@when_emulation_changes
def _forget_choices() -> None:
    _choices.clear()


native.when_forced.append(_forget_choices)


def _torch_is_asked_for(call: Call) -> bool:
    """Returns whether this is attention inside ``torch.nn.attention.sdpa_kernel``, or with a backend of torch's SDPA
    switched off."""
    if call.op in ("append", "int8_matmul", "merge") or thread.serving_torch:
        return False
    return asked().sdpa


def choose(call: Call) -> Choice:
    """Returns the choice for ``call``. Raises ``InputError`` where a forced backend cannot run it."""
    forced = thread.forced
    if forward_ad._current_level >= 0 and call.only_torch is None:  # a kernel would drop the tangents silently
        call = call._replace(only_torch=reasons.FORWARD_MODE)
    is_compiling = torch.compiler.is_compiling()
    if torch._C._are_functorch_transforms_active():  # flash-decoding has no rule for vmap
        call = call._replace(may_decode=False)
    if is_compiling:  # the compiled graph keeps the choice
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
    if choice.lacking is not None and _fallback_mode() != "silent":
        _warn_once(f"fastattn runs Triton kernels here instead of its CUDA C++ ones: {choice.lacking}")
    if thread.serving_torch and choice.backend == "torch":
        raise NoKernel
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
    if mode == "warn":
        _warn_once(f"fastattn runs this call in PyTorch: {reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warn_at_users_line(message, RuntimeWarning)


def _decide(call: Call, forced: str | None, torch_asked_for: bool) -> Choice:
    device_facts = facts(call.device)
    rejected: dict[str, str] = {}
    chosen = "torch"
    for backend in KERNEL_BACKENDS:
        reason = reason_against(backend, call, device_facts)
        if reason is None and forced is not None and forced != backend:
            reason = reasons.another_is_forced(forced)
        if reason is None and forced is None and torch_asked_for:
            reason = reasons.SDPA_KERNEL
        if reason is not None:
            rejected[backend] = reason
        elif chosen == "torch":
            chosen = backend
        else:
            rejected[backend] = reasons.another_comes_first(chosen, backend)
    if forced is not None and forced != chosen:
        raise InputError(f'use_backend("{forced}") cannot run this call: {rejected[forced]}')
    if chosen != "torch":
        assert device_facts is not None
        rejected["torch"] = reasons.A_KERNEL_RUNS
        seen = _as_the_kernel_sees(call, SUPPORT[call.op][chosen])
        decoding = _as_decoding(chosen, seen, device_facts)
        prefilling = _as_prefilling(chosen, seen, device_facts)
        kernel, tile = _describe(chosen, decoding or prefilling or seen, device_facts)
        dims = seen.head_dim, seen.value_dim
        padded = dims if dims != (call.head_dim, call.value_dim) else None
        decodes, prefills = decoding is not None, prefilling is not None
        is_second_best = chosen == "triton" and forced is None
        lacking = lacking_for_cuda(call, device_facts) if is_second_best else None
        return Choice(chosen, kernel, tile, rejected, None, padded, decodes, prefills, lacking)
    detour = None
    if device_facts is not None and forced is None and not torch_asked_for:
        found = reasons.each_once(rejected)
        detour = " ".join(f"{names}: {reason}" if len(found) > 1 else reason for names, reason in found.items())
    return Choice("torch", "PyTorch", None, rejected, detour)


def _as_the_kernel_sees(call: Call, support: Support) -> Call:
    """Returns the call with the head dims of the kernel, to which the call's own are padded."""
    head_dim, value_dim = (support.kernel_head_dim(dim) for dim in (call.head_dim, call.value_dim))
    assert head_dim is not None and value_dim is not None
    return call._replace(head_dim=head_dim, value_dim=value_dim)


# Few queries over many keys go to the decoding kernel: a tile of the attention kernels has 128 rows, and few CTAs would
# each walk over all keys. Both numbers are predictions: 16 queries are those of speculative decoding, and with 1024
# keys there is something to share out.
_FEW_QUERIES = 16
_MANY_KEYS = 1024
_MOST_KEYS = 2**30  # for flash-decoding, so that sums of positions stay within 32 bits
# Over a cache, the decoding kernel gets at most this many queries of a sequence where there is a choice: more of them
# fill tiles of the attention kernel (a prediction too). For an 8-bit cache the attention kernel reads a 16-bit copy.
# That pays from about 280 rows of a KV head on, where 222 * rows / 32 = 222 + 890 + 3 * rows. For 16 keys of 128 dims
# an SM of an H200 takes 222 clocks to read them in 8 bits, as the decoding kernel does for each 32 rows; 890 to write
# and read them in 16 bits; and 3 for each row at 65 % of the tensor cores' peak.
MOST_DECODED_QUERIES = 64
MOST_DECODED_ROWS_OF_8_BITS = 256
_OF_ATTENTION = frozenset(FEATURES["attention"])  # torch 2.11's dynamo intersects no set with keys()
_DECODED = _OF_ATTENTION & frozenset(FEATURES["decode"])


def _as_decoding(backend: str, call: Call, device_facts: DeviceFacts) -> Call | None:
    """Returns attention with few queries over many keys as a call of the decoding kernel, or None for other calls."""
    if call.op != "attention" or not call.may_decode or not call.features <= _DECODED:
        return None
    batch, heads, kv_heads, num_queries, num_keys = call.sizes
    conditions = (
        batch > 0,
        heads > 0,
        num_queries > 0,
        num_queries <= _FEW_QUERIES,
        num_keys >= _MANY_KEYS,
        num_keys < _MOST_KEYS,
    )
    if not (_hold_in_graph(conditions) if torch.compiler.is_compiling() else all(conditions)):
        return None
    rows = num_queries * (heads // kv_heads)
    decoding = call._replace(op="decode", sizes=(rows, call.dtype.itemsize, 0))
    return decoding if reason_against(backend, decoding, device_facts) is None else None


def _hold_in_graph(conditions: tuple[Any, ...]) -> bool:
    """Returns whether all conditions on sizes hold while a graph is made.

    torch.compile makes another graph for sizes where they do not hold. An exported program is one graph for all sizes
    that it takes, so a condition must hold for all of them. (Before torch 2.13 every graph looks like an exported one.)
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    for condition in conditions:
        if not (statically_known_true(condition) if torch.compiler.is_exporting() else guard_or_false(condition)):
            return False
    return True


def _as_prefilling(backend: str, call: Call, device_facts: DeviceFacts) -> Call | None:
    """Returns decoding with many queries as a call of the attention kernel over pages, or None for other calls."""
    if call.op != "decode" or not call.may_prefill:
        return None
    features = call.features & _OF_ATTENTION | {"varlen", "paged"}
    prefilling = call._replace(op="attention", features=features)
    return prefilling if reason_against(backend, prefilling, device_facts) is None else None


def _describe(backend: str, call: Call, device_facts: DeviceFacts) -> tuple[str, Any]:
    """Returns the kernel's name and its tile, for ``explain``."""
    tile: Any
    if torch.compiler.is_compiling():  # nobody reads them there, and they would tie the graph to a range of sizes
        return call.op, None
    if backend == "cuda":
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
    if call.op == "append":
        return "decode_append.append_to_slots_kernel", None
    if call.op == "merge":
        return "merge_attention.merge_attention_kernel", None
    tokens, outputs, depth, _ = call.sizes
    sizes = (tokens, depth, outputs, 0) if call.is_input_gradient else call.sizes
    tile = tiles.int8_matmul_tile(device_facts.arch, *sizes, device_facts.shared_memory_bytes, device_facts.num_sms)
    return f"int8_matmul.{'grad_input' if call.is_input_gradient else 'forward'}_kernel", tile


def _native_kernel(call: Call, device_facts: DeviceFacts) -> str:
    """Returns the name of the CUDA C++ kernel that the library chooses."""
    features, arch, dtype = call.features, device_facts.arch, call.dtype
    head_dim, value_dim = int(call.head_dim), int(call.value_dim)  # a tracer's symbols become numbers
    if call.op == "int8_matmul":
        name = native.int8_matmul_kernel(*_int8_call(call, device_facts))
    elif call.op == "append":
        name = native.append_kernel(arch, max(head_dim, value_dim), dtype, _cache_format(features))
    elif call.op == "decode":
        rows, shared_bytes = int(call.sizes[0]), device_facts.shared_memory_bytes
        widest = max(head_dim, value_dim)
        name = native.decode_kernel(arch, shared_bytes, widest, dtype, _cache_format(features), rows)
    else:
        name = native.attention_forward_kernel(
            arch,
            head_dim,
            value_dim,
            dtype,
            changes_scores=not features.isdisjoint(CHANGES_SCORES),
            paged="paged" in features,
        )
    if name is None:
        raise RuntimeError(f"fastattn's library was built without the kernel for {call}: build it with all kernels")
    return name


def _cache_format(features: frozenset[str]) -> str:
    """Returns the one of ``native.CACHE_FORMATS`` that the features name."""
    return next((name for name in native.CACHE_FORMATS if f"{name} cache" in features), "16-bit")


def _int8_call(call: Call, device_facts: DeviceFacts) -> tuple[Any, ...]:
    """Returns the arguments with which to ask the library about an int8 matmul.

    With gradients, PyTorch applies activation and residual, so only a bias counts as an epilogue.
    """
    features, gpu = call.features, (device_facts.arch, device_facts.num_sms)
    if call.is_input_gradient:
        tokens, outputs, depth = map(int, call.sizes[:3])
        traits = call.dtype, "group scales" in features, False
        return "int8_matmul_grad_input", *gpu, *traits, tokens, depth, outputs
    op = "int8_matmul_s8" if "int8 activations" in features else "int8_matmul"
    follows = {"bias"} if "gradients" in features else {"bias", "residual", "activation", *GATED}
    traits = call.dtype, "group scales" in features, not features.isdisjoint(follows)
    return op, *gpu, *traits, *map(int, call.sizes[:3])


def is_watched() -> bool:
    """Returns whether this thread forces a backend or somebody watches what runs: then every call must be chosen."""
    return thread.forced is not None or thread.explaining or is_recording()
