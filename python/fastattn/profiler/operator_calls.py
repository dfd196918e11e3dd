"""Reads the calls of fastattn's operators, as PyTorch's profiler records them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastattn.ops.registration import NAMESPACES

# The profiler's name of a dtype → torch's name and the bytes of an element.
_DTYPES = {
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Half": ("float16", 2),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "signed char": ("int8", 1),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
}


class Argument(NamedTuple):
    """Describes an operator's argument as the profiler recorded it: a tensor's shape and dtype, or a scalar's text."""

    shape: tuple[int, ...]
    dtype: str
    text: str

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in ("", "Scalar")

    @property
    def itemsize(self) -> int:
        return _DTYPES[self.dtype][1] if self.dtype in _DTYPES else 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize if self.is_tensor else 0


@dataclass(frozen=True)
class OperatorCall:
    """Describes a call of an operator in one of ``NAMESPACES``."""

    name: str
    arguments: Mapping[str, Argument]

    def __getitem__(self, name: str) -> Argument:
        """Returns the argument ``name``, or an empty argument, which is no tensor, if the operator does not have it."""
        return self.arguments.get(name, Argument((), "", ""))

    def nbytes(self, *names: str) -> int:
        """Returns the total bytes of the tensors ``names``, by default of all tensors."""
        return sum(self[name].nbytes for name in names or self.arguments)

    def number(self, name: str) -> int:
        return int(self.arguments[name].text)

    @property
    def dtype(self) -> str:
        """Returns torch's name of the dtype of the matrix products' operands."""
        if self["int8_activations"].text == "True":
            return "int8"
        dtype = next((self[name].dtype for name in ("query", "x", "grad_out", "k_new") if name in self.arguments), "")
        return _DTYPES.get(dtype, (dtype, 0))[0]


def operator_call(
    qualified_name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], texts: Sequence[str]
) -> OperatorCall | None:
    """Returns the call from the profiler's lists, which have an entry for each argument.

    Returns None for an operator that is not fastattn's, and a call without arguments if the lists do not fit.
    """
    namespace, _, name = qualified_name.partition("::")
    if namespace not in NAMESPACES.values():
        return None
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    names = [argument.name for argument in schema.arguments]
    if not len(names) == len(shapes) == len(dtypes) == len(texts):
        return OperatorCall(name, {})
    seen = zip(names, shapes, dtypes, texts, strict=True)
    return OperatorCall(name, {each: Argument(tuple(shape), dtype, text) for each, shape, dtype, text in seen})
