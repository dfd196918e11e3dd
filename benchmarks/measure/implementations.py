"""What the harness measures: an implementation of an operation, fastattn's own or a peer's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn

# The peer that the speed-ups of int8 weights refer to.
CUBLAS = "cuBLAS, 16-bit weight"


class Unsupported(Exception):
    """An implementation does not offer what a case asks for; the message says what."""


class Prepared(NamedTuple):
    """A call on one set of inputs. ``outputs`` brings its result into fastattn's layout; it is not timed."""

    call: Callable[[], Any]
    outputs: Callable[[Any], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Implementation:
    """Somebody's code for an operation.

    ``prepare(case, inputs)`` does what a user does once (layouts, plans, quantisation) and returns what is timed; it
    raises ``Unsupported`` where the case is beyond it. ``context`` is entered around everything.
    """

    name: str
    version: str
    prepare: Callable[[Any, Any], Prepared]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    is_peer: bool = True


def require(condition: bool, missing: str) -> None:
    """Raise ``Unsupported("no " + missing)`` unless ``condition``."""
    if not condition:
        raise Unsupported(f"no {missing}")


def first(result: Any) -> Any:
    """The output of a function that, depending on its version, also returns the lse."""
    return result[0] if isinstance(result, tuple) else result


def importable(module: str) -> bool:
    """Whether a package can be imported: one that is installed but broken counts as absent, and is named."""
    try:
        if importlib.util.find_spec(module) is None:
            return False
        importlib.import_module(module)
    except Exception as error:
        broken[module] = f"{type(error).__name__}: {error}".splitlines()[0]
        return False
    return True


# Module → why it could not be imported although it is installed.
broken: dict[str, str] = {}


def version_of(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def own_implementations(prepare: Callable[[Any, Any], Prepared], backends: Iterable[str]) -> list[Implementation]:
    """fastattn with each of its kernel backends."""
    version = fastattn.native.BUILD["version"]

    def using(backend: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        return lambda: fastattn.use_backend(backend)

    return [Implementation(f"fastattn {each}", version, prepare, using(each), is_peer=False) for each in backends]


def torch_version() -> str:
    """torch's version, with cuDNN's where there is one."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"{torch.__version__}, cuDNN {cudnn}" if cudnn else torch.__version__
