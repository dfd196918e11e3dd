"""The operators as PyTorch sees them: namespaces, shape functions, autograd, vmap, FLOP counts.

The schemas are C++ (``csrc/bindings.cpp``). ``torch.ops.fastattn`` holds the CUDA C++ kernels,
``torch.ops.fastattn_triton`` the Triton ones under the same schemas. Functions of this module take the backend first,
then the schema's arguments.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastattn import native  # noqa: F401  (native loads the schemas)
from fastattn.activations import ACTIVATIONS, result_columns
from fastattn.dispatch import choose as dispatch
from fastattn.dispatch.choose import RecordedCall
from fastattn.dispatch.device import is_emulated, when_emulation_changes
from fastattn.ops import flops, vmap
from fastattn.run.layout import empty_like_heads, padded, readable, sum_over_tokens

# Operator → the module of triton_kernels whose function of the same name launches it.
_TRITON_LAUNCHERS = {
    "attention_forward": "attention_forward",
    "attention_backward": "attention_backward",
    "attention_decode": "decode",
    "int8_matmul": "int8_matmul",
    "int8_matmul_grad_input": "int8_matmul",
}
_NAMESPACES = {"cuda": "fastattn", "triton": "fastattn_triton"}
_libraries = {backend: torch.library.Library(namespace, "FRAGMENT") for backend, namespace in _NAMESPACES.items()}


def _overload(backend: str, name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACES[backend]), name).default
    return overload


def _triton_launcher(name: str) -> Callable[..., Any]:
    """Imports Triton at the first call only. Triton launches on the current device: that has to be the tensors'."""

    def launch(*args: Any) -> Any:
        module = importlib.import_module(f"fastattn.triton_kernels.{_TRITON_LAUNCHERS[name]}")
        device = args[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return getattr(module, name)(*args)
        with torch.cuda.device(device):
            return getattr(module, name)(*args)

    return launch


for _name in _TRITON_LAUNCHERS:
    _schema = str(_overload("cuda", _name)._schema)
    _libraries["triton"].define(_schema.removeprefix("fastattn::"), tags=(torch.Tag.pt2_compliant_tag,))
    _libraries["triton"].impl(_name, _triton_launcher(_name), "CUDA")


_on_cpu: list[torch.library.Library] = []


@when_emulation_changes
def _register_on_cpu() -> None:
    """The Triton ops take CPU tensors while those are declared to be on an emulated GPU, and only then."""
    while _on_cpu:
        _on_cpu.pop()._destroy()
    if is_emulated():
        library = torch.library.Library(_NAMESPACES["triton"], "FRAGMENT")
        for name in _TRITON_LAUNCHERS:
            library.impl(name, _triton_launcher(name), "CPU")
        _on_cpu.append(library)


def _refuse_gradients(backend: str, name: str) -> None:
    """A raw op called on tensors that need gradients raises: only the functions of this module differentiate."""
    overload = _overload(backend, name)

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = itertools.chain(args, kwargs.values())
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{overload}: the raw operator has no gradient, and an argument requires one; call the public "
                "function of fastattn, or call the operator under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    _libraries[backend].impl(name, autograd_kernel, "Autograd", with_keyset=True)


def _call(backend: str, name: str, *args: Any) -> Any:
    overload = _overloads[backend, name]
    if torch.compiler.is_compiling():
        return overload(*args)
    with torch._C._AutoDispatchBelowAutograd():  # spares the Python kernel of _refuse_gradients
        return overload(*args)


# --- shape functions -----------------------------------------------------------------------------------------------


def _fake_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    alibi_slopes: Any,
    sinks: Any,
    seed: Any,
    cu_seqlens_q: Any,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is not None:
        total, heads = query.shape[:2]
        return query.new_empty(total, heads, value.shape[-1]), query.new_empty(heads, total, dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return empty_like_heads(query, value.shape[-1]), lse


def _fake_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    cu_seqlens_q, bias_grad = options[1], options[-1]
    if cu_seqlens_q is not None:
        grads = tuple(t.new_empty(t.shape) for t in (query, key, value))
    else:
        grads = tuple(empty_like_heads(t, t.shape[-1]) for t in (query, key, value))
    grad_bias = query.new_empty(bias.shape if bias_grad and bias is not None else (0,), dtype=torch.float32)
    grad_sinks = query.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)
    return *grads, grad_bias, grad_sinks


def _fake_attention_decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return empty_like_heads(query, v_cache.shape[-1]), lse


def _fake_int8_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Any, residual: Any, activation: str, *_: Any
) -> Tensor:
    return x.new_empty((*x.shape[:-1], result_columns(activation, weight.shape[0])))


def _fake_int8_matmul_grad_input(
    grad_out: Tensor, weight: Tensor, scale: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    grad_bias = grad_out.new_empty(weight.shape[0] if bias_grad else 0)
    return grad_out.new_empty((*grad_out.shape[:-1], weight.shape[1])), grad_bias


_FAKES: dict[str, Callable[..., Any]] = {
    "attention_forward": _fake_attention_forward,
    "attention_backward": _fake_attention_backward,
    "attention_decode": _fake_attention_decode,
    "int8_matmul": _fake_int8_matmul,
    "int8_matmul_grad_input": _fake_int8_matmul_grad_input,
}
_FLOPS: dict[str, Callable[..., int]] = {
    "attention_forward": flops.forward_flops,
    "attention_backward": flops.backward_flops,
    "attention_decode": flops.decode_flops,
    "int8_matmul": flops.matmul_flops,
    "int8_matmul_grad_input": flops.matmul_flops,
}
_VMAPS: dict[str, Callable[..., Any]] = {
    "attention_forward": vmap.attention_forward_rule,
    "attention_backward": vmap.attention_backward_rule,
    "int8_matmul": vmap.matmul_rule,
    "int8_matmul_grad_input": vmap.matmul_grad_input_rule,
}
_overloads: dict[tuple[str, str], torch._ops.OpOverload] = {}
for _backend, _name in itertools.product(_NAMESPACES, _TRITON_LAUNCHERS):
    _overloads[_backend, _name] = _overload(_backend, _name)
    _qualified = f"{_NAMESPACES[_backend]}::{_name}"
    torch.library.register_fake(_qualified, _FAKES[_name], lib=_libraries[_backend])
    _refuse_gradients(_backend, _name)
    register_flop_formula(getattr(getattr(torch.ops, _NAMESPACES[_backend]), _name))(_FLOPS[_name])
    if _name in _VMAPS:
        _rule = _VMAPS[_name](_overloads[_backend, _name])
        torch.library.register_vmap(_qualified, _rule, lib=_libraries[_backend])


# --- autograd ------------------------------------------------------------------------------------------------------


class _Once(torch.autograd.Function):
    """An op inside a backward pass that itself is being recorded (``create_graph=True``, ``torch.func.grad``).

    Recording it is allowed; differentiating it raises.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, name: str, *args: Any) -> Any:
        return _call(backend, name, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f'{ctx.name}: second derivatives are not implemented; use_backend("torch") has them')


def _call_in_backward(backend: str, name: str, *args: Any) -> Any:
    return _apply(_Once, backend, name, *args) if torch.is_grad_enabled() else _call(backend, name, *args)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without the ``inspect.signature`` at every call (10 µs) that only functorch needs."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # forward and backward are one op each, and the ops have vmap rules

    @staticmethod
    def forward(backend: str, deterministic: bool, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = _call(backend, "attention_forward", *args)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, ctx.deterministic, *tensors = inputs[:11]
        ctx.save_for_backward(*tensors, *output)
        ctx.options = inputs[11:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        nothing = (None,) * 19
        if grad_out is None and grad_lse is None:
            return nothing
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        bias_grad = bias is not None and ctx.needs_input_grad[5]
        if not torch.compiler.is_compiling():
            dispatch.note(RecordedCall("attention backward", ctx.backend, "attention_backward"))
        gradients = _call_in_backward(
            ctx.backend,
            "attention_backward",
            grad_out,
            grad_lse,
            query,
            key,
            value,
            out,
            lse,
            bias,
            slopes,
            sinks,
            seed,
            cu_seqlens_q,
            cu_seqlens_k,
            *ctx.options,
            ctx.deterministic,
            bias_grad,
        )
        grad_query, grad_key, grad_value, grad_bias, grad_sinks = gradients
        grad_bias = grad_bias.to(bias.dtype) if bias_grad else None
        grad_sinks = grad_sinks if sinks is not None else None
        return (None, None, grad_query, grad_key, grad_value, grad_bias, None, grad_sinks, *nothing[8:])


def _distinct(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """One tensor in two places becomes two: torch.compile takes no autograd.Function with the same input twice."""
    result: list[Any] = []
    for tensor in tensors:
        is_repeated = tensor is not None and any(tensor is earlier for earlier in result)
        result.append(tensor.view_as(tensor) if is_repeated else tensor)
    return tuple(result)


def attention(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    softcap: float,
    dropout_p: float,
    block_table: Tensor | None = None,
    *,
    needs_grad: bool,
    deterministic: bool,
    head_dims: tuple[int, int] | None = None,
    decodes: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and lse, differentiable in query, key, value, bias, sinks and through the lse.

    ``head_dims``: those of query and value that the kernel takes, where others have to be padded to them.
    ``decodes``: the decoding kernel computes it (dispatch.Choice).
    """
    if head_dims is not None:
        value_dim = value.shape[-1]
        query, key, value = padded(query, head_dims[0]), padded(key, head_dims[0]), padded(value, head_dims[1])
    tensors = (query, key, value, bias, alibi_slopes, sinks, dropout_seed, cu_seqlens_q, cu_seqlens_k)
    options = (max_seqlen_q, max_seqlen_k, scale, window_left, window_right, top_left, softcap, dropout_p)
    if needs_grad:
        if torch.compiler.is_compiling():
            tensors = _distinct(tensors)
        out, lse = _apply(_Attention, backend, deterministic, *tensors, *options)
    elif decodes:
        lengths = torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device)
        append = (None, None, None, None, False)
        cache = (readable(key), readable(value), lengths, *append, None, None, None)
        window = (window_left, window_right)
        out, lse = attention_decode(backend, query, *cache, alibi_slopes, sinks, scale, *window, softcap, 0, False)
    else:
        out, lse = _call(backend, "attention_forward", *tensors, *options, block_table)
    return (out if head_dims is None else out[..., :value_dim]), lse


def attention_decode(backend: str, *args: Any) -> tuple[Tensor, Tensor]:
    """Output and lse; appends to the caches in place. Not differentiable."""
    out, lse = _call(backend, "attention_decode", *args)
    return out, lse


class _Int8Matmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        backend: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, int8_activations: bool
    ) -> Tensor:
        y: Tensor = _call(backend, "int8_matmul", x, weight, scale, bias, None, "none", int8_activations)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, _, weight, scale, bias, _ = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, scale)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weight, scale = ctx.saved_tensors
        needs_bias = ctx.has_bias and ctx.needs_input_grad[4]
        if not ctx.needs_input_grad[1]:
            return None, None, None, None, sum_over_tokens(grad_out) if needs_bias else None, None
        if not torch.compiler.is_compiling():
            dispatch.note(RecordedCall("int8_matmul backward", ctx.backend, "int8_matmul_grad_input"))
        arguments = (grad_out, weight, scale, needs_bias)
        grad_x, grad_bias = _call_in_backward(ctx.backend, "int8_matmul_grad_input", *arguments)
        return None, grad_x, None, None, grad_bias if needs_bias else None, None


def int8_matmul(
    backend: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    int8_activations: bool = False,
) -> Tensor:
    """``act(x @ dequantize(weight)^T + bias) + residual``, differentiable in x, bias and residual.

    ``int8_activations``: rows of x are rounded to int8 first; the gradient passes straight through.
    Where gradients are wanted, the activation and the residual are PyTorch's, over the kernel's product.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, residual)):
        product: Tensor = ACTIVATIONS[activation](
            _apply(_Int8Matmul, backend, x, weight, scale, bias, int8_activations)
        )
        return product if residual is None else product + residual
    y: Tensor = _call(backend, "int8_matmul", x, weight, scale, bias, residual, activation, int8_activations)
    return y
