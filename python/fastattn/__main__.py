"""``python -m fastattn`` prints the installed versions, the kernels that were built, and what each GPU runs."""

from __future__ import annotations

import argparse
import importlib.metadata

import torch

from fastattn import native
from fastattn.dispatch import device
from fastattn.dispatch.reasons import unavailable
from fastattn.dispatch.support import OLDEST_ARCH, support_table

WITHOUT_CUDA_KERNELS = """none: built without CUDA C++ kernels, so GPUs run the Triton kernels.
In a clone, run `make install` to build for the GPUs that it finds, or `make install FASTATTN_ARCHS="80;90a"` to build
for all; make installs the compiler if there is none. Elsewhere, install a CUDA toolkit, set CUDA_HOME to its directory
and install fastattn again."""


def native_code_for(arch: int) -> str:
    """Returns a phrase that names the library's code for GPUs of ``arch``, a compute capability times ten."""
    code = native.code_for(arch)
    if "PTX" in code:
        return "CUDA C++ kernels, compiled from PTX by the driver at first use"
    return f"CUDA C++ kernels in machine code for {' and '.join(code)}"


def triton_version() -> str:
    """Returns the installed triton's version, or a text that says it is not installed, without importing triton."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: GPUs run no Triton kernels; run `pip install triton`"


def describe_gpu(index: int) -> str:
    """Returns lines about CUDA device ``index``: name, compute capability, memory, and which kernels run on it."""
    gpu = torch.device("cuda", index)
    facts = device.facts(gpu)
    name = torch.cuda.get_device_name(gpu)
    if facts is None or facts.arch < OLDEST_ARCH:
        return f"{name}: PyTorch's own kernels run; fastattn's need sm_{OLDEST_ARCH} or later"
    memory_gib = torch.cuda.get_device_properties(gpu).total_memory / 2**30
    triton, cuda = (unavailable(backend, gpu, facts) for backend in ("triton", "cuda"))
    lines = [
        f"{name}, sm_{facts.arch}, {memory_gib:.0f} GiB",
        f"no CUDA C++ kernels: {cuda}" if cuda else native_code_for(facts.arch),
        f"no Triton kernels: {triton}" if triton else "Triton kernels",
    ]
    return "\n".join(lines)


def report() -> str:
    """Returns the report on versions, kernels and GPUs, one fact per line."""
    build = native.BUILD
    kernels = WITHOUT_CUDA_KERNELS
    if build["archs"]:
        code = dict.fromkeys(name for names in build["code"].values() for name in names)
        names = ", ".join("PTX" if name.startswith("compute") else name for name in code)
        kernels = f"{len(native.KERNELS)}, as {names}, compiled by nvcc {build['nvcc']}"
    gpus = [describe_gpu(index) for index in range(torch.cuda.device_count())] or ["none: PyTorch's own kernels run"]
    facts = [
        ("fastattn", build["version"]),
        ("library", f"{native.LIBRARY_PATH} (built against torch {build['torch']})"),
        ("CUDA C++ kernels", kernels),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("triton", triton_version()),
        *((f"GPU {index}" if torch.cuda.device_count() else "GPU", text) for index, text in enumerate(gpus)),
    ]
    width = max(len(name) for name, _ in facts)
    lines = []
    for name, text in facts:
        first, *rest = text.splitlines()
        lines += [f"{name:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in rest)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastattn", description="Describe this installation of fastattn.")
    parser.add_argument("--short", action="store_true", help="leave out the table of what each backend supports")
    arguments = parser.parse_args()
    print(report())
    if not arguments.short:
        print(f"\n{support_table()}")


if __name__ == "__main__":
    main()
