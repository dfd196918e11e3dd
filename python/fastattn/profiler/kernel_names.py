"""Recognises and shortens the kernel names that the profiler shows."""

from __future__ import annotations

import re

# The names of fastattn's Triton kernels. In the replay of a CUDA graph, nothing but its name identifies a kernel.
_TRITON_KERNEL = re.compile(
    r"(attention_(forward|backward_\w+)|split|append|append_to_slots|combine|dequantize|forward|grad_input|merge"
    r"|merge_attention(_backward)?|tile_states|list_tiles)_kernel"
)


def is_fastattn_kernel(kernel: str) -> bool:
    """Returns whether a kernel's name alone says that it belongs to this package."""
    return "fastattn::" in kernel or _TRITON_KERNEL.fullmatch(kernel) is not None


def base_name(kernel: str) -> str:
    """Returns the bare name, ``attention_forward_sm80`` for ``void fastattn::attention_forward_sm80<64, …>(…)``."""
    before_template = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0]
    return before_template.rpartition("::")[2]


def short_name(kernel: str) -> str:
    """Returns a C++ name without namespace, return type and parameters, but with its template arguments."""
    match = re.match(r"(?:void )?[\w:]*?(\w+)(<.*>)?(?:\(.*\))?$", kernel)
    if match is None:
        return kernel
    template = re.sub(r"\([\w:]+\)", "", match[2] or "")
    return match[1] + template
