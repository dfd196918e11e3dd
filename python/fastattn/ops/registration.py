"""Registers kernels as operators of PyTorch, with shape functions, vmap rules and FLOP counts.

CUDA C++ and Triton kernels have a namespace each. The schemas come from C++ (``csrc/bindings.cpp``), and the Triton
operators have the same schemas. An operator without a CUDA C++ kernel has its schema in this package, and is only in
Triton's namespace. The other files of this package register the operators and differentiate them.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import native
from fastattn.after_import import after_import
from fastattn.call import AttentionCall
from fastattn.dispatch.device import is_emulated, when_emulation_changes
from fastattn.namespace import NAMESPACE

NAMESPACES = {"cuda": NAMESPACE, "triton": f"{NAMESPACE}_triton"}
_libraries = {backend: torch.library.Library(namespace, "FRAGMENT") for backend, namespace in NAMESPACES.items()}
_triton_launchers: dict[str, Callable[..., Any]] = {}


class Operator:
    """Calls an operator with the kernel of a given backend, through the backend's namespace.

    Attributes:
        Arguments: the named tuple of its arguments, with the order and the defaults of its schema.
        tensors: the names of the arguments that are tensors.
    """

    def __init__(self, name: str, record: Any, overloads: dict[str, torch._ops.OpOverload]) -> None:
        self.name, self._overloads = name, overloads
        schema = next(iter(overloads.values()))._schema.arguments
        names = tuple(argument.name for argument in schema)
        defaults = [argument.default_value for argument in schema if argument.has_default_value()]
        self.Arguments: Any = namedtuple(name, names, defaults=defaults)  # type: ignore[misc]
        self.tensors = tuple(argument.name for argument in schema if "Tensor" in str(argument.type))
        record = record or self.Arguments
        # The record of a backward pass holds the record of the forward call in its field ``call``.
        paths = tuple((name,) if hasattr(record, name) else ("call", name) for name in names)
        for in_record, *inner in paths:
            is_there = hasattr(record, in_record) and all(hasattr(AttentionCall, field) for field in inner)
            assert is_there, f"{name}: {record.__name__} has no {(inner or [in_record])[-1]}"
        self._paths, self._take = paths, operator.attrgetter(*map(".".join, paths))

    def arguments(self, call: Any) -> Any:
        """Returns the operator's arguments from the record ``call``, in the order of the schema."""
        if not torch.compiler.is_compiling():
            return self._take(call)
        return [getattr(call, path[0]) if len(path) == 1 else getattr(call.call, path[1]) for path in self._paths]

    def __call__(self, backend: str, call: Any) -> Any:
        """Calls the operator with its arguments from the record ``call``, without gradients."""
        return self.run(backend, self.arguments(call))

    def run(self, backend: str, arguments: Iterable[Any]) -> Any:
        """Calls the operator with ``arguments``, without gradients."""
        overload = self._overloads[backend]
        if torch.compiler.is_compiling():
            return overload(*arguments)
        with torch._C._AutoDispatchBelowAutograd():  # skips the Python kernel of _refuse_gradients
            return overload(*arguments)

    def run_in_backward(self, backend: str, arguments: Iterable[Any]) -> Any:
        """Calls the operator with ``arguments`` in a backward pass, which autograd may record too."""
        if torch.is_grad_enabled():
            return apply(_Once, backend, self.name, *arguments)
        return self.run(backend, arguments)


_operators: dict[str, Operator] = {}


def register(
    name: str,
    record: Any,
    *,
    triton_module: str,
    fake: Callable[[Any], Any] = lambda given: None,
    flops: Callable[[Any], int] = lambda given: 0,
    vmap: Callable[[torch._ops.OpOverload, Any, Any, int], Any] | None = None,
    schema: str | None = None,
) -> Operator:
    """Registers the operator ``name`` in both namespaces, or only in Triton's.

    Args:
        record: the type of a call, which has the operator's arguments as attributes; None: ``Operator.Arguments``.
        triton_module: the module of ``triton_kernels`` whose function ``name`` launches the Triton kernel. The function
            takes the operator's ``Arguments``.
        fake: takes the operator's ``Arguments`` and returns empty results of the right shapes. The default is for an
            operator that returns nothing.
        flops: takes the operator's ``Arguments`` with shapes instead of tensors, and returns the FLOPs that torch's
            counter shows.
        vmap: takes an overload, its ``Arguments``, their mapped dimensions and the number of samples. Returns what a
            rule for ``torch.library.register_vmap`` returns. With None, ``torch.vmap`` raises.
        schema: the arguments and results of an operator that only Triton has. None takes the C++ library's schema.
    """
    namespaces = NAMESPACES if schema is None else {"triton": NAMESPACES["triton"]}
    if schema is None:
        schema = str(getattr(native.OPS, name).default._schema).removeprefix(f"{NAMESPACE}::{name}")
    _libraries["triton"].define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    packets = {backend: getattr(getattr(torch.ops, namespace), name) for backend, namespace in namespaces.items()}
    op = _operators[name] = Operator(name, record, {backend: packet.default for backend, packet in packets.items()})
    _triton_launchers[name] = _triton_launcher(triton_module, op)
    _libraries["triton"].impl(name, _triton_launchers[name], "CUDA")

    def fake_of(*args: Any) -> Any:
        return fake(op.Arguments(*args))

    for backend, packet in packets.items():
        qualified, library = f"{namespaces[backend]}::{name}", _libraries[backend]
        torch.library.register_fake(qualified, fake_of, lib=library)
        library.impl(name, _refuse_gradients(packet.default), "Autograd", with_keyset=True)
        if vmap is not None:
            torch.library.register_vmap(qualified, _vmap_rule(op, vmap, packet.default), lib=library)
        _count_flops(packet, lambda *args, **kwargs: flops(op.Arguments(*args, **kwargs)))
    if is_emulated():
        _register_on_cpu()
    return op


def _vmap_rule(op: Operator, vmap: Callable[..., Any], overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        not_given = [None] * (len(op.Arguments._fields) - len(in_dims))
        return vmap(overload, op.Arguments(*args), op.Arguments(*in_dims, *not_given), info.batch_size)

    return rule


def _count_flops(packet: torch._ops.OpOverloadPacket, flops: Callable[..., int]) -> None:
    """Registers a FLOP formula as soon as other code imports torch's FLOP counter, because that import loads Triton."""

    def register_formula() -> None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(packet)(lambda *args, out_shape=None, **kwargs: flops(*args, **kwargs))

    after_import("torch.utils.flop_counter", register_formula)


def _triton_launcher(module: str, op: Operator) -> Callable[..., Any]:
    """Returns a launcher that imports Triton at its first call.

    Triton launches on the current device, so the launcher sets it to the device of the tensors.
    """

    def launch(*args: Any) -> Any:
        launcher = getattr(importlib.import_module(f"..triton_kernels.{module}", __package__), op.name)
        given, device = op.Arguments(*args), args[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(given)
        with torch.cuda.device(device):
            return launcher(given)

    return launch


_on_cpu: list[torch.library.Library] = []


@when_emulation_changes
def _register_on_cpu() -> None:
    """Makes the Triton operators take CPU tensors while a GPU is emulated, and only then."""
    while _on_cpu:
        _on_cpu.pop()._destroy()
    if is_emulated():
        library = torch.library.Library(NAMESPACES["triton"], "FRAGMENT")
        for name, launcher in _triton_launchers.items():
            library.impl(name, launcher, "CPU")
        _on_cpu.append(library)


# --- calling and differentiating ------------------------------------------------------------------------------------


def _refuse_gradients(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns an autograd kernel that raises if a tensor requires gradients, which only public functions compute."""

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = itertools.chain(args, kwargs.values())
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{overload}: the raw operator has no gradient, and an argument requires one; call the public "
                "function of fastattn, or call the operator under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return autograd_kernel


class _Once(torch.autograd.Function):
    """Runs an operator of a backward pass that autograd records (``create_graph=True``, ``torch.func.grad``).

    Computing its gradient, a second derivative, raises.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, name: str, *arguments: Any) -> Any:
        return _operators[name].run(backend, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.name, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Under use_backend("torch"), attention may run PyTorch's fused kernels, which lack second derivatives too.
        is_attention, name = ctx.name == "attention_backward", ctx.name.removesuffix("_backward")
        block = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)" if is_attention else 'fastattn.use_backend("torch")'
        raise RuntimeError(
            f"{name}: second derivatives are not implemented; wrap the call in `with {block}:` to get them"
        )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls ``function.apply(*args)`` without its ``inspect.signature`` (10 µs a call), which only functorch needs."""
    if torch.compiler.is_compiling():
        return function.apply(*_distinct(args))
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _distinct(arguments: Iterable[Any]) -> list[Any]:
    """Replaces repeated tensors by views, because torch.compile cannot trace an autograd.Function with equal inputs."""
    result: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor) and any(argument is earlier for earlier in result):
            argument = argument.view_as(argument)
        result.append(argument)
    return result


# --- vmap -----------------------------------------------------------------------------------------------------------


def refuse_mapped(dims: Any, *names: str) -> None:
    """Raises ``NotImplementedError`` if ``torch.vmap`` maps one of the arguments ``names`` (not None in ``dims``)."""
    for name in names:
        if getattr(dims, name) is not None:
            raise NotImplementedError(
                f"{name}: torch.vmap cannot map this argument; pass one tensor for all samples, with None in in_dims"
            )


def in_front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """Returns the tensor with the mapped dimension first; repeats a tensor that is not mapped."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)


def fold_into_heads(tensor: Tensor | None, mapped: int | None, size: int, heads_dim: int) -> Tensor | None:
    """Folds the mapped dimension into dimension ``heads_dim`` of a sample; repeats a tensor that is not mapped."""
    if tensor is None:
        return None
    return in_front(tensor, mapped, size).movedim(0, heads_dim).flatten(heads_dim, heads_dim + 1)


def unfold_heads(tensor: Tensor, size: int, heads_dim: int) -> Tensor:
    """Undoes ``fold_into_heads``: the mapped dimension comes first."""
    return tensor.unflatten(heads_dim, (size, -1)).movedim(heads_dim, 0)
