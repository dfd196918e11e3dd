"""Formulates the reasons why a backend does not run a call, as sentences that a user can act on.

``explain`` shows the reasons. The error about a forced backend and the warning about a call that runs in PyTorch quote
the reasons. Public functions formulate the reasons about their own arguments, and pass them as ``Request.only_torch``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from fastattn import native
from fastattn.dispatch.device import DeviceFacts
from fastattn.dispatch.request import Request
from fastattn.dispatch.support import FEATURES, FUNCTIONS, SUPPORT, Support

# Reasons against every kernel, whatever the call is.
SDPA_KERNEL = (
    "torch.nn.attention.sdpa_kernel (or torch.backends.cuda.enable_…_sdp) selects PyTorch's own attention; call "
    "outside of it to run fastattn's kernels."
)
FORWARD_MODE = (
    "forward-mode differentiation is active (torch.func.jvp, forward_ad), and the kernels have gradients for backward "
    "mode only; make the call inside of torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which supports both modes."
)

# The reason against PyTorch where a kernel was chosen.
A_KERNEL_RUNS = "a kernel of fastattn runs this call."

_NAMES = {"cuda": "CUDA C++", "triton": "Triton"}
_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None


def another_is_forced(forced: str) -> str:
    """Returns the reason against every backend but ``forced``."""
    return f'use_backend("{forced}") is in force; call outside of it to let fastattn choose.'


def another_comes_first(chosen: str, backend: str) -> str:
    """Returns the reason against ``backend``, which could run the call but is tried after ``chosen``."""
    return f'{chosen} comes first (no measurement says that {backend} is faster); use_backend("{backend}") selects it.'


def each_once(rejected: dict[str, str]) -> dict[str, str]:
    """Returns each reason once; its key lists the backends that it rejects, joined by commas."""
    names: dict[str, list[str]] = {}
    for backend, reason in rejected.items():
        names.setdefault(reason, []).append(backend)
    return {", ".join(backends): reason for reason, backends in names.items()}


def reason_against(backend: str, request: Request, device_facts: DeviceFacts | None) -> str | None:
    """Returns why ``backend`` cannot run ``request``, as a sentence that a user can act on, or None."""
    if request.only_torch is not None:
        return request.only_torch
    if device_facts is None:
        return f"the tensors are on {request.device.type}, and the kernels need an NVIDIA GPU; move them to cuda."
    support = SUPPORT[request.op.name].get(backend)
    if support is None:
        return f"{FUNCTIONS[request.op.name].replace('`', '')} has no {_NAMES[backend]} kernel."
    why_not = unavailable(backend, request.device, device_facts)
    return why_not or _kernel_reason(backend, support, request, device_facts)


def lacking_for_cuda(request: Request, device_facts: DeviceFacts) -> str | None:
    """Returns what this build or the driver lacks to run ``request`` by a CUDA C++ kernel. Returns None if nothing is
    lacking, or if no CUDA C++ kernel takes the call anyway."""
    support = SUPPORT[request.op.name].get("cuda")
    if support is None or (request.device.type == "cpu" and not native.TAKES_CPU_TENSORS):
        return None
    lacking = unavailable("cuda", request.device, device_facts)
    if lacking is None or _kernel_reason("cuda", support, request, device_facts) is not None:
        return None
    return lacking


def _kernel_reason(backend: str, support: Support, request: Request, device_facts: DeviceFacts) -> str | None:
    if device_facts.arch < support.min_arch:
        return (
            f"the GPU has compute capability {device_facts.arch // 10}.{device_facts.arch % 10}, and the kernels need "
            f"{support.min_arch // 10}.{support.min_arch % 10} or later (A100 or newer)."
        )
    if request.dtype not in support.dtypes:
        advice = "cast the tensors or use torch.autocast"
        return f"the dtype is {request.dtype}, and the kernels take {support.dtypes_text()}; {advice}."
    refusal = request.op.refusal(backend, request, device_facts)
    if refusal is not None:
        return refusal
    for name, dim in (("head dim", request.head_dim), ("value head dim", request.value_dim)):
        taken = support.kernel_head_dim(dim)
        if taken is None or ("paged" in request.features and taken != dim):
            advice = _advice_on_padding(name, dim, support)
            return f"the {name} is {dim}, and the kernels take {support.head_dims_text()}{advice}."
        limit = support.most_dims_with_gradients
        if limit is not None and "gradients" in request.features and dim > limit:
            return (
                f"the {name} is {dim}, and the kernels have gradients up to {limit}; under "
                "torch.no_grad() the kernels take this call."
            )
    missing = request.features - support.features
    if not missing:
        return None
    has_a_way = "paged gradients" in missing
    advice = "; use torch.no_grad(), or pass packed keys and values without block_table" if has_a_way else ""
    return f"the kernels do not have: {words_for(request.op.name, missing)}{advice}."


def _advice_on_padding(name: str, dim: int, support: Support) -> str:
    """Returns advice to create the cache with a head dim that the kernels take, because fastattn never pads a cache."""
    padded = replace(support, pads=True).kernel_head_dim(dim)
    if padded is None:
        return ""
    scale = f", and pass scale={dim} ** -0.5 to attention" if name == "head dim" else ""
    return f"; fastattn never pads a cache: create it with {name} {padded}, zero-pad the other tensors to match{scale}"


def words_for(op: str, features: frozenset[str]) -> str:
    """Returns the descriptions of these features in support.py, joined by commas."""
    return ", ".join(words for feature, words in FEATURES[op].items() if feature in features)


def unavailable(backend: str, device: torch.device, device_facts: DeviceFacts) -> str | None:
    """Returns why no kernel of ``backend`` can run on the device, whatever the call is, or None."""
    if backend == "cuda":
        if device.type == "cpu" and not native.TAKES_CPU_TENSORS:
            return "the GPU is emulated, and the library was not built for emulation; run `python -m emulator build`."
        if "80" not in native.BUILD["archs"]:
            return "the library was built without CUDA C++ kernels; `python -m fastattn` says how to get them."
        if device_facts.arch >= 80 and not native.code_for(device_facts.arch):
            return (
                f"the library was built for other GPUs ({', '.join(native.BUILD['archs'])}), and this one is "
                f"sm_{device_facts.arch}; build fastattn again with FASTATTN_ARCHS=native."
            )
        major, minor = (int(part) for part in native.BUILD["cuda"].split("."))
        if device_facts.driver_cuda is not None and device_facts.driver_cuda < 1000 * major + 10 * minor:
            supported = f"{device_facts.driver_cuda // 1000}.{device_facts.driver_cuda % 1000 // 10}"
            return (
                f"the driver supports CUDA {supported}, and the library was built with {major}.{minor}; update the "
                "driver, or build fastattn with an older CUDA toolkit."
            )
        return None
    if not _TRITON_IS_INSTALLED:
        return "triton is not installed; run `pip install triton`."
    return None


# The tensor types that torch's tracers pass to the functions they trace. The operators have shape functions for these.
_TRACING_TENSORS = frozenset({"FakeTensor", "FunctionalTensor", "Buffer"})
_WAYS_TO_A_PLAIN_TENSOR = {
    "AsyncCollectiveTensor": "wait()",
    "DTensor": "to_local()",
    "NestedTensor": "values()",
    "nested tensor": "to_padded_tensor(0.0)",
}


def only_torch_handles(*tensors: Tensor | None) -> str | None:
    """Returns why only PyTorch can take one of these tensors (nested ones, DTensor, other subclasses), or None."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        kind = type(tensor)
        is_plain = kind is Tensor or kind is torch.nn.Parameter or kind.__name__ in _TRACING_TENSORS
        if not is_plain or tensor.is_nested:
            name = kind.__name__ if not is_plain else "nested tensor"
            way = _WAYS_TO_A_PLAIN_TENSOR.get(name, "as_subclass(torch.Tensor)")
            return f"an argument is a {name}, and the kernels take plain tensors; pass what its {way} returns."
    return None
