"""Defines an implementation of an operation, fastattn's own or a peer's, which the harness measures."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn

# Speed-ups of int8 weights are relative to this peer.
CUBLAS = "cuBLAS, 16-bit weight"


class Unsupported(Exception):
    """Says what an implementation lacks for a case."""


class Prepared(NamedTuple):
    """Holds a call on one set of inputs. ``outputs``, which is not timed, converts its result to fastattn's layout."""

    call: Callable[[], Any]
    outputs: Callable[[Any], tuple[Tensor, ...]]


Prepare = Callable[[Any, Any], Prepared]


@dataclass(frozen=True)
class Implementation:
    """Describes a library's implementation of an operation.

    ``prepare(case, inputs)`` does what a user does once (layouts, plans, quantisation) and returns the call to time. It
    raises ``Unsupported`` if the implementation cannot run the case. Everything runs within ``context()``.
    """

    name: str
    version: str
    prepare: Prepare
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    is_peer: bool = True


def require(condition: bool, missing: str) -> None:
    """Raises ``Unsupported("no " + missing)`` unless ``condition``."""
    if not condition:
        raise Unsupported(f"no {missing}")


def first(result: Any) -> Any:
    """Returns the output of a function whose result, in some versions, is a tuple of the output and the lse."""
    return result[0] if isinstance(result, tuple) else result


def importable(module: str) -> bool:
    """Returns whether a package can be imported. If it is installed but fails to import, ``broken`` gets the reason."""
    try:
        if importlib.util.find_spec(module) is None:
            return False
        importlib.import_module(module)
    except Exception as error:
        broken[module] = f"{type(error).__name__}: {error}".splitlines()[0]
        return False
    return True


# Maps each module that is installed but cannot be imported to the reason.
broken: dict[str, str] = {}


def version_of(*distributions: str) -> str:
    """Returns the version of the first of these distributions that is installed, or "unknown"."""
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def installed(packages: Iterable[tuple[str, str, tuple[str, ...], Prepare]]) -> list[Implementation]:
    """Returns a peer for each (name, module, distributions, prepare) whose module can be imported."""
    return [
        Implementation(name, version_of(*distributions), prepare)
        for name, module, distributions, prepare in packages
        if importable(module)
    ]


def own_implementations(prepare: Prepare, backends: Iterable[str]) -> list[Implementation]:
    """Returns fastattn as an implementation with each of these kernel backends."""
    version = fastattn.native.BUILD["version"]
    return [
        Implementation(f"fastattn {each}", version, prepare, partial(fastattn.use_backend, each), is_peer=False)
        for each in backends
    ]


def torch_version() -> str:
    """Returns torch's version, and cuDNN's if it is available."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"{torch.__version__}, cuDNN {cudnn}" if cudnn else torch.__version__
