"""Whose a kernel is, from the name that the profiler shows."""

from __future__ import annotations

import re

# Names that are fastattn's wherever they appear: in the replay of a CUDA graph no operator tells whose a kernel is.
_TRITON_KERNEL = re.compile(
    r"(attention_(forward|backward_\w+)|split|append|append_to_slots|combine|dequantize|forward|grad_input|merge"
    r"|merge_attention(_backward)?)_kernel"
)


def is_fastattn_kernel(kernel: str) -> bool:
    """Whether a kernel's name alone says that it is one of this package."""
    return "fastattn::" in kernel or _TRITON_KERNEL.fullmatch(kernel) is not None


def base_name(kernel: str) -> str:
    """``attention_forward_sm80`` of ``void fastattn::attention_forward_sm80<64, …>(…)``."""
    before_template = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0]
    return before_template.rpartition("::")[2]


def short_name(kernel: str) -> str:
    """A C++ name without its namespace, return type and parameters, but with its template arguments."""
    match = re.match(r"(?:void )?[\w:]*?(\w+)(<.*>)?(?:\(.*\))?$", kernel)
    if match is None:
        return kernel
    template = re.sub(r"\([\w:]+\)", "", match[2] or "")
    return match[1] + template
