"""Translates mangled names of CUDA C++ kernels into the names that the library uses."""

from __future__ import annotations

import re
from typing import Any

DTYPES = ("float16", "bfloat16")  # in the order of the C++ enum DataType
# The words for a kernel's bool template argument: for false, and for true.
FLAGS = {
    "attention_forward_sm80": ("", "few keys"),
    "attention_forward_options_sm80": ("", "paged"),
    "attention_backward_key_value_sm80": ("plain", "options"),
    "attention_backward_key_value_sm90": ("", "options"),
    "attention_backward_key_value_wide_sm90": ("", "options"),
    "int8_matmul_sm90": ("", "groups"),
    "int8_matmul_s8_sm90": ("", "groups"),
}
CACHES = ("", "int8", "fp8")  # in the order of the C++ enum CacheFormat


def _parse(symbol: str) -> tuple[Any, ...]:
    """Returns a mangled kernel's name, and the texts of its template arguments, None for those that it lacks."""
    arguments = (
        r"(?:Li(\d+)E)?(?:Li(\d+)E)?(?:LN\w*?8DataTypeE(\d)E)?(?:Lb([01])E)?(?:LN\w*?11CacheFormatE(\d)E)?(?:Li(\d+)E)?"
    )
    match = re.match(rf"_ZN8fastattn\d+(\w+?_sm\d+)(?:I{arguments}E)?E", symbol)
    assert match is not None, symbol
    return match.groups()


def arguments_of(symbol: str) -> tuple[str, list[Any]]:
    """Returns a mangled kernel's name and its template arguments, as `instances.rows_of` gives them, in any order."""
    kernel, size, value_dim, dtype, flag, cache, rows = _parse(symbol)
    arguments: list[Any] = [int(number) for number in (size, value_dim, rows) if number is not None]
    arguments += [DTYPES[int(dtype)]] if dtype is not None else []
    arguments += [CACHES[int(cache)] or "16-bit"] if cache is not None else []
    arguments += [flag == "1"] if flag is not None else []
    return kernel, arguments


def name_of(symbol: str) -> str:
    """Returns the library's name of a mangled kernel, such as ``attention_forward_sm80<64, bfloat16>``."""
    kernel, size, value_dim, dtype, flag, cache, rows = _parse(symbol)
    texts = (
        size or "",
        value_dim if value_dim is not None and value_dim != size else "",
        DTYPES[int(dtype)] if dtype is not None else "",
        FLAGS[kernel][int(flag)] if flag is not None else "",
        CACHES[int(cache)] if cache is not None else "",
        f"{rows} rows" if rows not in (None, "16") else "",
    )
    listed = ", ".join(filter(None, texts))
    return f"{kernel}<{listed}>" if listed else kernel
