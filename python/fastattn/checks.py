"""Checks the types, shapes, dtypes and devices of arguments, and the values that the host knows.

Each error names the argument, what was expected and what came.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.dispatch.device import is_emulated
from fastattn.errors import InputError

MOST_HEADS = 256  # a larger dim is assumed not to count heads; known models have at most 128
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def expect(condition: bool, name: str, expected: str, came: object) -> None:
    """Raises an ``InputError``, "name: expected …, got …", unless ``condition`` holds."""
    if not condition:
        raise InputError(f"{name}: expected {expected}, got {came}")


# Arguments that users might pass as lists or numpy arrays → the arguments with which torch.tensor converts them.
_MADE_WITH = {
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table", "key_ranges"),
        ", dtype=torch.int32, device=query.device",
    ),
    **dict.fromkeys(("alibi_slopes", "sinks"), ", dtype=torch.float32, device=query.device"),
    "slot_mapping": ", dtype=torch.int64, device=k_new.device",
}


def check_tensor(name: str, value: Any, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, Tensor):
        advice, is_array = "", type_name(value) == "numpy.ndarray"
        if isinstance(value, (list, tuple)) and any(isinstance(element, Tensor) for element in value):
            advice = f"; pass torch.stack({name})"
        elif isinstance(value, (list, tuple)) or (is_array and name in _MADE_WITH):
            advice = f"; pass torch.tensor({name}{_MADE_WITH.get(name, '')})"
        elif is_array:
            advice = f"; pass torch.from_numpy({name})"
        elif isinstance(value, nn.Module) and isinstance(getattr(value, name, None), Tensor):
            advice = f"; pass the layer's parameter, {name}.{name}"
        elif name == "cache_seqlens" and isinstance(value, Integral):
            advice = f"; for equal lengths pass torch.full(query.shape[:1], {value}{_MADE_WITH[name]})"
        raise TypeError(f"{name}: expected a torch.Tensor{' or None' if optional else ''}, got {shown(value)}{advice}")


# Each line has the names of one argument, in fastattn's functions and in other libraries.
_SAME_ARGUMENT = """
    causal is_causal
    bias attn_mask attention_mask mask
    scale softmax_scale sm_scale
    window window_size sliding_window
    dropout_p dropout
    softcap logits_soft_cap
    sinks s_aux learnable_sink
    return_lse return_softmax_lse
    block_table page_table
    cache_seqlens seqused_k seq_lens seqlens context_lens
    k_new k
    v_new v
    num_layers num_hidden_layers n_layers
    batch batch_size max_batch_size
    kv_heads num_kv_heads num_key_value_heads n_kv_heads
    head_dim head_size
    num_pages num_blocks
    page_size block_size
    quantized kv_cache_dtype
    granularity group_size
"""
_NAMES_OF = {name: line.split() for line in _SAME_ARGUMENT.splitlines() for name in line.split()}

_MASKS = "bias attn_mask attention_mask mask"

# Advice on keywords that fastattn does not have under another name. Each line has the unknown keywords; a parameter
# that the called function must have for the advice to apply, or None for any function; and the advice.
_ADVICE = (
    ("enable_gqa", None, "leave it out: keys and values can always have fewer heads than queries"),
    ("key_padding_mask", "bias", "if True means padding, pass bias=~key_padding_mask[:, None, None, :]"),
    ("block_mask", "key_ranges", "pass key_ranges=fastattn.masks.from_block_mask(block_mask)"),
    ("score_mod", "softcap", "no function of scores is taken: use softcap, alibi_slopes or a bias"),
    ("return_softmax_lse return_lse", "return_attn_probs", "return_attn_probs=True returns the lse, too"),
    ("return_attn_probs need_weights", None, "probabilities are never formed, and return_lse=True returns the lse"),
    ("cu_seqlens_q", None, "attention_varlen takes packed sequences"),
    (_MASKS, "cu_seqlens_q", "packed sequences take key_ranges (fastattn.masks) or alibi_slopes"),
    (_MASKS, "tree_mask", "each query sees all tokens up to its own; window and tree_mask restrict them"),
    (
        "cache_leftpad leftpad_k cache_batch_idx",
        "tree_mask",
        "fastattn.integrations.flash_attn.flash_attn_with_kvcache takes it",
    ),
    (
        _MASKS,
        "window_size",
        "flash-attn has no masks; fastattn.attention takes a bool mask or a bias as bias=, in [B, H, S, D]",
    ),
    (
        "window window_size sliding_window softcap alibi_slopes sinks key_ranges dropout_seed return_lse deterministic",
        "enable_gqa",
        "fastattn.attention takes it",
    ),
    ("num_heads", "kv_heads", "pass the number of heads of keys and values as kv_heads"),
    ("batch batch_size max_batch_size", "num_pages", "the number of sequences is not fixed: add() makes one"),
    ("capacity max_seq_len max_length max_cache_len", "num_pages", "num_pages * page_size tokens fit, in all"),
    ("max_seq_len max_length max_seqlen max_cache_len", "max_capacity", "max_capacity is how many tokens fit at most"),
    (
        "modules_to_not_convert llm_int8_skip_modules skip_modules exclude skip ignore",
        "filter",
        'pass filter=lambda name, module: "lm_head" not in name',
    ),
)


def refuse_keywords(function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raises a ``TypeError`` like Python's own for unknown keywords. The message names the first keyword that fastattn
    has under another name, or the first of all if there is none."""
    first, *others = unknown
    parameters = inspect.signature(function).parameters.items()
    known = [name for name, parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    name = next((name for name in (first, *others) if not set(known).isdisjoint(_NAMES_OF.get(name, ()))), first)
    advice = advice_on_keyword(name, known) or f"; help({function.__name__}) lists its arguments"
    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{advice}")


def advice_on_keyword(name: str, known: Collection[str]) -> str:
    """Returns advice for an error about the unknown keyword ``name``: what to do instead, or the keyword among
    ``known`` that means the same or is spelled similarly. Returns an empty string if there is no advice."""
    for names, required, advice in _ADVICE:
        if name in names.split() and (required is None or required in known):
            return f"; {advice}"
    note = {"is_causal": ", and aligns to the bottom right", "causal": ", and aligns to the top left"}.get(name, "")
    for meant in _NAMES_OF.get(name, ()):
        if meant in known:
            return f"; it is called {meant!r} here{note}"
    same_initial = [other for other in known if other[:1] == name[:1]]  # otherwise scale would be suggested for k_scale
    similar = difflib.get_close_matches(name, same_initial, n=1, cutoff=0.8)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def check_rank(name: str, tensor: Tensor, layout: str, advice: str = "") -> None:
    """Checks the number of dims. ``layout`` names them: ``"[B, Hq, Sq, D]"``. ``advice`` is appended to the error."""
    rank = layout.count(",") + 1
    expect(tensor.dim() == rank, name, f"{rank} dimensions {layout}", f"{tensor.dim()}: {list(tensor.shape)}{advice}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], layout: str, advice: str = "") -> None:
    came = f"{list(tensor.shape)}{advice}"
    expect(tuple(tensor.shape) == tuple(shape), name, f"shape {layout} = {list(shape)}", came)


def check_dtype(name: str, tensor: Tensor, dtypes: Iterable[torch.dtype], advice: str | None = None) -> None:
    """Checks the dtype. ``advice`` is appended to the error; by default, it is a call that casts the tensor."""
    allowed = tuple(dtypes)
    if allowed == (torch.bool,) and tensor.is_floating_point():
        advice = f"; pass {name}.bool() if 1 means True, or {name} == 0 if it was made to be added to scores"
    elif advice is None:
        is_fp8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1  # kernels take no float32, so not for fp8
        wide = torch.bfloat16 if is_fp8 else torch.float32
        advice = f"; cast it with {name}.to({wide if wide in allowed else allowed[0]})"
    expect(tensor.dtype in allowed, name, " or ".join(str(dtype) for dtype in allowed), f"{tensor.dtype}{advice}")


def check_same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    expected, came = f"a tensor on {device} like the first argument", f"one on {tensor.device}"
    expect(tensor.device == device, name, expected, f'{came}; move it with {name}.to("{device}")')


def check_head_counts(query: Tensor, key: Tensor, key_name: str, layouts: Sequence[str]) -> None:
    """Checks that the number of query heads is a multiple of the number of KV heads, both in dim 1. ``layouts`` holds
    the names of the query's dims and of the key's dims."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0:
        came = f"0 in {key_name} {list(key.shape)}"
        expect(heads == 0, key_name, f"at least one KV head for {heads} query heads in {layouts[1]}", came)
    elif heads % kv_heads:
        expected = f"a multiple of the {kv_heads} KV heads (query {layouts[0]}, {key_name} {layouts[1]})"
        came = "1 head" if heads == 1 else f"{heads} heads"
        expect(False, "query", expected, came + _advice_on_swapped(query, key, key_name))


def _advice_on_swapped(query: Tensor, key: Tensor, key_name: str) -> str:
    """Returns the end of an error: the shapes and, if the head counts would be valid after swapping heads and rows,
    advice to swap them."""
    dims = [(0, 1) if tensor.dim() == 3 else (1, 2) for tensor in (query, key)]
    (q, k) = (tensor.shape[swapped[0] + swapped[1] - 1] for tensor, swapped in zip((query, key), dims, strict=True))
    shapes = f"query {list(query.shape)}, {key_name} {list(key.shape)}"
    few_queries = q < query.shape[1] or query.shape[1] == 1
    if 0 < k <= q <= MOST_HEADS and few_queries and q % k == 0:
        swaps = f"query.transpose{dims[0]}, {key_name}.transpose{dims[1]} and so on"
    elif 0 < k <= query.shape[1] and query.shape[1] % k == 0:
        swaps = f"{key_name}.transpose{dims[1]} and so on"
    elif q != k and 0 < q <= MOST_HEADS and q % key.shape[1] == 0:  # only the query: a cache has the right layout
        swaps = f"query.transpose{dims[0]} and so on"
    else:
        return f": {shapes}"
    return f": {shapes} look as if heads came after rows; if they do, pass {swaps}"


def refuse_wrapped(name: str, tensor: Tensor | None) -> None:
    """Raises ``InputError`` for nested tensors and DTensors, because PyTorch's own errors would be less helpful."""
    if tensor is None or not isinstance(tensor, Tensor):
        return
    if tensor.is_nested:
        kind = "jagged" if tensor.layout == torch.jagged else "strided"
        raise InputError(
            f"{name}: expected a dense tensor, got a nested one ({kind}). fastattn.attention takes query, key and "
            "value that are all jagged, attention_varlen takes values() and offsets() of jagged tensors"
        )
    if is_distributed(tensor):
        raise InputError(
            f"{name}: expected a plain tensor, got a DTensor; pass {name}.to_local(). fastattn.attention and "
            "attention_varlen take it as it is if query, key and value are all DTensors"
        )


def is_distributed(tensor: Any) -> bool:
    """Returns whether ``tensor`` is a DTensor, by the name of its class, because importing the class takes a second."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def needs_gradient(tensor: Tensor | None) -> bool:
    """Returns whether a tensor, or a tensor that ``torch.func`` has wrapped in it, requires a gradient.

    A tensor that ``torch.vmap`` maps over has ``requires_grad=False`` itself.
    """
    if tensor is None:
        return False
    needs: bool = tensor.requires_grad
    if needs or torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return needs
    functorch = torch._C._functorch
    while not needs and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        needs = tensor.requires_grad
    return needs


def mapped_size(*tensors: Any) -> int:
    """Returns how many samples ``torch.vmap`` passes to an operator at once: the product of the mapped dims."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return 1
    functorch = torch._C._functorch
    size_of_level: dict[int, int] = {}
    for tensor in tensors:
        while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
            wrapped, tensor = tensor, functorch.get_unwrapped(tensor)
            if functorch.is_batchedtensor(wrapped):
                size_of_level[functorch.maybe_get_level(wrapped)] = tensor.shape[functorch.maybe_get_bdim(wrapped)]
    return math.prod(size_of_level.values())


def numbers_below(count: int, nouns: str) -> str:
    """Returns the valid indices of ``count`` things as words for an error, such as "pages from 0 to 7"."""
    if count > 1:
        return f"{nouns} from 0 to {count - 1}"
    return "0, the only one" if count else f"no {nouns}, as there are none"


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    expect(value in choices, name, "one of " + ", ".join(repr(choice) for choice in choices), repr(value))


def check_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Checks and returns ``value`` as a Python int or ``SymInt``; also takes numpy's integers."""
    value = _without_numpy(value)
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        advice = f"; pass {name}.item(), which on a GPU waits for the device" if _is_number(value) else ""
        raise TypeError(f"{name}: expected an int, got {shown(value)}{advice}")
    if minimum is not None:
        expect(value >= minimum, name, f"at least {minimum}", value)
    return value  # type: ignore[return-value]  # a SymInt counts as an int


def check_number(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """Checks and returns ``value`` as a finite Python number within ``[low, high]``; also takes numpy's numbers."""
    value = _without_numpy(value)
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, bool):
        advice = f"; pass {name}.item(), which on a GPU waits for the device" if _is_number(value) else ""
        raise TypeError(f"{name}: expected a number, got {shown(value)}{advice}")
    in_range = (low is None or value >= low) and (high is None or value <= high)
    largest = sys.float_info.max  # an int can exceed this and still be less than infinity
    finite = -largest <= value <= largest
    bounds = f" from {low} to {high}" if high is not None else f" of at least {low}" if low is not None else ""
    expect(finite and in_range, name, f"a finite number{bounds}", value)
    return value  # type: ignore[return-value]  # a SymFloat counts as a float


def check_bool(name: str, value: Any) -> bool:
    """Checks and returns ``value`` as a Python bool; also takes numpy's bool."""
    value = _without_numpy(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, True or False, got {shown(value)}")
    return value


def check_torch_dtype(dtype: Any) -> None:
    """Checks that the argument ``dtype`` is one of the floating ``torch.dtype`` that fastattn takes."""
    if not isinstance(dtype, torch.dtype):
        meant = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        advice = f"; pass {meant}" if meant in FLOATING else ""
        raise TypeError(f"dtype: expected a torch.dtype, got {shown(dtype)}{advice}")
    check_choice("dtype", dtype, FLOATING)


def checked_device(device: Any) -> torch.device:
    """Returns the argument ``device`` as a ``torch.device``; None means torch's default device."""
    try:
        return torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:  # torch's error does not name the argument
        why = f": {error}" if isinstance(device, int) else ""
        raise InputError(
            f'device: expected a torch.device, or a name such as "cuda", got {shown(device)}{why}'
        ) from None


def shown(value: Any) -> str:
    """Returns the type of ``value`` for an error, and the value itself if it is a number or a short text."""
    is_short = isinstance(value, (str, int, float)) and len(repr(value)) < 60
    return f"{type_name(value)} {value!r}" if is_short else type_name(value)


def type_name(value: Any) -> str:
    """Returns the name of ``value``'s type for an error, with its module unless built in.

    The module tells apart types of the same name, such as numpy's bool and Python's.
    """
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _without_numpy(value: Any) -> Any:
    """Converts a numpy scalar (bool, integer or floating) to a Python one; returns everything else as it is."""
    if type(value) in (bool, int, float) or isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    numpy = sys.modules.get("numpy")  # no import: numpy scalars exist only if numpy is imported already
    if numpy is None or isinstance(value, numpy.timedelta64):  # a subclass of numpy.integer, but a duration
        return value
    for kind, python_kind in ((numpy.bool_, bool), (numpy.integer, int), (numpy.floating, float)):
        if isinstance(value, kind):
            return python_kind(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


_WORDS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


def device_checks_are_on() -> bool:
    """Returns whether ``FASTATTN_CHECK=1`` asks to check values in device memory too, for which the host synchronises.

    Returns False while torch compiles or a CUDA graph is captured.
    """
    if torch.compiler.is_compiling():
        return False
    word = os.environ.get("FASTATTN_CHECK", "")
    asked = _WORDS.get(word.strip().lower())
    if asked is None:
        raise InputError(f"FASTATTN_CHECK: expected 1, true, yes, 0, false, no or nothing, got {word!r}")
    return asked and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def contents_are_checked(*tensors: Tensor | None) -> bool:
    """Returns whether a call reads and checks the values of ``tensors``: lengths, offsets or tables.

    A call checks values that `is_readable` allows to read, and with ``FASTATTN_CHECK=1`` also values on a GPU. If a GPU
    is emulated, CPU tensors count as GPU tensors.
    """
    return device_checks_are_on() or (is_readable(*tensors) and not is_emulated())


def is_readable(*tensors: Tensor | None) -> bool:
    """Returns whether the host can read values: the tensors are on a CPU, and nothing traces or transforms the call."""
    return (
        not torch.compiler.is_compiling()
        and all(t is None or (t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)) for t in tensors)
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.jit.is_tracing()
    )
