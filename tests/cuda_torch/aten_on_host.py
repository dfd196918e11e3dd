"""Computes torch's CUDA operators on the CPU, over the same memory: the emulated device's memory is the host's.

torch's own kernels are machine code, which the emulator cannot execute. So every aten operator that has a CUDA kernel
gets another kernel, which calls the operator on CPU tensors that share its arguments' memory. It runs in stream order;
while a stream is captured, it becomes a node of the graph.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_torch import sdpa_on_host

# Allocation, views, the choice of SDPA's back end, and copies between devices stay torch's own code, which calls the
# emulated runtime.
_KEPT = {
    "empty.memory_format",
    "empty_strided",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "resize_",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "_local_scalar_dense",
    "_fused_sdp_choice",
    "_cudnn_init_dropout_state",
}

_generators: dict[tuple[int, int], torch.Generator] = {}  # by (seed, offset) of the CUDA generator that each stands for


def alias(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor over the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(array, dtype=torch.uint8)
    out = torch.empty(0, dtype=tensor.dtype)
    out.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        out = out.conj()
    return torch._neg_view(out) if tensor.is_neg() else out


def _generator(cuda: torch.Generator) -> torch.Generator:
    """Returns the CPU generator for a CUDA generator, which it advances. Equal CUDA generators draw equal numbers."""
    state = cuda.get_state().view(torch.int64)
    seed, offset = state.tolist()
    own = _generators.pop((seed, offset), None) if offset else None
    state[1] = offset + 4
    cuda.set_state(state.view(torch.uint8))
    _generators[seed, offset + 4] = own or torch.Generator().manual_seed(seed + offset)
    return _generators[seed, offset + 4]


def _follow(cuda: Tensor, resized: Tensor) -> bool:
    """Gives a tensor the shape and strides of another; returns whether the shape changed."""
    if cuda.shape == resized.shape:
        return False
    cuda.resize_(resized.shape)
    cuda.as_strided_(resized.shape, resized.stride())
    return True


class _Arguments:
    """The arguments of one call, lowered to CPU tensors, and the conversion of its results back to CUDA."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []  # (CPU, CUDA)
        self.meta: dict[int, Tensor] = {}  # by index in `given`
        self.device = torch.device("cuda", torch.cuda.current_device())

    def lower(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            self.device = value.device
            self.given.append((alias(value), value))
            return self.given[-1][0]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.lower, value))
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = value if value.index is not None else self.device
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "cuda":
            return _generator(value)
        return value

    def follow_sizes(self) -> None:
        """Resizes tensors on the device that the operator has resized on the CPU (``out=`` without elements)."""
        for cpu, cuda in self.given:
            if _follow(cuda, cpu):
                _write(alias(cuda), cpu)

    def lift(self, value: Any) -> Any:
        """Copies a result to the device; for a result that is an argument, returns the argument."""
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                return value
            for cpu, cuda in self.given:
                if value is cpu:
                    return cuda
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            if value.numel():
                alias(out).copy_(value)
            return out
        return type(value)(map(self.lift, value)) if isinstance(value, (list, tuple)) else value

    def as_meta(self, value: Any) -> Any:
        """Returns an argument with meta tensors in place of the CPU tensors of `lower`."""
        if isinstance(value, Tensor):
            for index, (cpu, _) in enumerate(self.given):
                if value is cpu:
                    return self.meta.setdefault(
                        index, torch.empty_strided(cpu.shape, cpu.stride(), dtype=cpu.dtype, device="meta")
                    )
            return value
        if isinstance(value, torch.device):
            return torch.device("meta")
        return type(value)(map(self.as_meta, value)) if isinstance(value, (list, tuple)) else value

    def follow_meta_sizes(self) -> None:
        for index, tensor in self.meta.items():
            _follow(self.given[index][1], tensor)

    def lift_shapes(self, value: Any) -> Any:
        """Makes results on the device from an operator's results for meta tensors."""
        if isinstance(value, Tensor):
            for index, tensor in self.meta.items():
                if value is tensor:
                    return self.given[index][1]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
        return type(value)(map(self.lift_shapes, value)) if isinstance(value, (list, tuple)) else value


def _aliases(results: Any) -> Any:
    """Returns results with each CUDA tensor replaced by its `alias`: like a CUDA graph, it keeps no tensor alive."""
    if isinstance(results, Tensor):
        return alias(results) if results.is_cuda else results
    return type(results)(map(_aliases, results)) if isinstance(results, (list, tuple)) else results


def _write(targets: Any, values: Any) -> None:
    """Copies an operator's results to the memory of the tensors that stand for them."""
    if isinstance(targets, Tensor):
        if targets.numel() and targets.data_ptr() != values.data_ptr():
            targets.copy_(values)
    elif isinstance(targets, (list, tuple)):
        for target, value in zip(targets, values, strict=True):
            _write(target, value)


def _tensor_arguments(op: Any) -> list[bool]:
    """Returns for each argument of the operator whether it is a tensor."""
    schema = getattr(op, "_schema", None)
    return [str(argument.type) == "Tensor" for argument in schema.arguments] if schema is not None else []


def on_host(op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a CUDA kernel for an operator that has a CPU kernel."""
    overload, tensors = op, _tensor_arguments(op)

    def compute(*args: Any, **kwargs: Any) -> Any:
        # torch passes a number for a tensor (``x & 1``) on as a number, which another overload takes.
        given = zip(args, tensors, strict=False)  # the last arguments may be missing
        has_number = any(is_tensor and isinstance(argument, (int, float, complex)) for argument, is_tensor in given)
        op = overload.overloadpacket if has_number else overload
        arguments = _Arguments()
        lowered = arguments.lower(args)
        named = {name: arguments.lower(value) for name, value in kwargs.items()}
        if not torch.cuda.is_current_stream_capturing():
            results = op(*lowered, **named)
            arguments.follow_sizes()
            return arguments.lift(results)
        # A capture computes nothing, and the arguments have no values yet: meta tensors give the results' shapes.
        shapes = op(*map(arguments.as_meta, lowered), **{n: arguments.as_meta(v) for n, v in named.items()})
        arguments.follow_meta_sizes()
        results = arguments.lift_shapes(shapes)
        from emulator.native import native

        stream = torch.cuda.current_stream(arguments.device).cuda_stream
        targets = _aliases(results)
        native.runtime.submit(stream, str(op), lambda: _write(targets, op(*lowered, **named)))
        return results

    return compute


def _copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Replaces ``aten::copy_`` for CUDA tensors: torch's own uses kernels for strides and for other dtypes."""
    to, origin = (alias(tensor) if tensor.is_cuda else tensor for tensor in (self, source))

    def copy() -> None:
        to.copy_(origin)

    if torch.cuda.is_current_stream_capturing():
        from emulator.native import native

        native.runtime.submit(torch.cuda.current_stream().cuda_stream, "aten::copy_", copy)
    else:
        copy()
    return self


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._softmax(x.float() if half_to_float else x, dim, False)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._log_softmax(x.float() if half_to_float else x, dim, False)


def _softmax_backward_data(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, output, dim, grad.dtype).to(input_dtype)


def _log_softmax_backward_data(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._log_softmax_backward_data(grad, output, dim, grad.dtype).to(input_dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    normal, wide = x.float() * rstd, grad.float()
    scaled = wide if weight is None else wide * weight.float()
    mean = (scaled * normal).mean(tuple(range(-len(shape), 0)), keepdim=True)
    grad_x = (rstd * (scaled - normal * mean)).to(x.dtype) if mask[0] else None
    return grad_x, None if weight is None or not mask[1] else (wide * normal).sum_to_size(shape).to(weight.dtype)


# Operators whose CPU kernels do not take what their CUDA kernels take, or do not exist.
_OTHERS: dict[str, Callable[..., Any]] = {
    **sdpa_on_host.OPERATORS,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_softmax": _softmax,  # may convert to float32
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward_data,  # may convert back
    "_log_softmax_backward_data": _log_softmax_backward_data,
}

_library: list[torch.library.Library] = []  # an override lives as long as its library


def install() -> list[str]:
    """Overrides all operators that can be overridden; returns the names of the others."""
    library, stayed = torch.library.Library("aten", "IMPL"), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each override
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            name = full.removeprefix("aten::")
            if not full.startswith("aten::") or name in _KEPT:
                continue
            packet, _, overload = name.partition(".")
            try:
                op = _OTHERS.get(name) or getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, on_host(op), "CUDA")
            except (AttributeError, RuntimeError):
                stayed.append(full)
        library.impl("copy_", _copy_, "CUDA")
    _library.append(library)
    return stayed
