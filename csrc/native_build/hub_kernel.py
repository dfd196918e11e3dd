"""Writes a kernel repository for the Hugging Face Hub, as the package ``kernels`` loads it.

The folder has one variant for torch without CUDA and, if there is an nvcc, one for GPUs. Each variant is a copy of the
package that imports nothing but the standard library, torch and (when a kernel is launched) Triton. Imports within
the copy are relative, because nobody knows under which name it will be imported. The operators of the copy's library
have a namespace of their own. This library takes its kernels from ``build/native``: only the bindings and the build's
description are compiled again.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from native_build.errors import BuildError
from native_build.library import LIBRARY_NAME, ROOT, TORCH_TARGET_VERSION, NativeBuild, configure
from native_build.wheel_tag import needed_versions, wheel_platform

# The version of the repository's interface on the Hub, and the first release of `kernels` that knows every key of
# metadata.json.
VERSION = 1
KERNELS_MINVER = "0.17.0"

# What the copy leaves out: the command line, a module that is generated instead, and code that imports another package.
LEFT_OUT = ("__main__.py", "namespace.py", "integrations/transformers")

NAMESPACE_MODULE = '''"""The namespace of this copy's operators, and the name under which it was imported."""

from __future__ import annotations

NAMESPACE = {namespace!r}
PACKAGE = __name__.rpartition(".")[0]
'''

# The functions that transformers expects from a kernel repository that it uses instead of flash-attn.
FLASH_ATTN = """
from .integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ += [name for name in dir() if name.startswith("flash_attn_")]
"""

CARD = """---
library_name: kernels
license: bsd-3-clause
---

# fastattn

Attention and int8 linear layers for PyTorch as CUDA C++ and Triton kernels. `kernels.get_kernel` gives a module with
the functions of flash-attn 2.8 (`flash_attn_func`, `flash_attn_varlen_func`, `flash_attn_with_kvcache`, …) and those of
fastattn {version} (`attention`, `attention_varlen`, `attention_with_kv_cache`, `int8_linear`, …).
"""


def with_relative_imports(text: str, package: tuple[str, ...]) -> str:
    """Makes imports of fastattn relative in ``text``, a module of ``package`` (``("ops",)`` for ``fastattn.ops``)."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "fastattn" for alias in node.names):
            raise BuildError(f"line {node.lineno}: `import fastattn` has no relative form; use `from fastattn import`")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "fastattn":
            line, start = lines[node.lineno - 1], node.col_offset
            relative = "." * (len(package) + 1) + (node.module or "").removeprefix("fastattn").removeprefix(".")
            lines[node.lineno - 1] = line[:start] + re.sub(r"^from fastattn[\w.]*", f"from {relative}", line[start:])
    return "".join(lines)


def modules(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yields the path and the text of each module of the copy except ``namespace.py``."""
    places = {root / "python" / "fastattn": Path(), root / "triton_kernels": Path("triton_kernels")}
    for folder, place in places.items():
        for path in sorted(folder.rglob("*.py")):
            name = place / path.relative_to(folder)
            if name.as_posix().startswith(LEFT_OUT):
                continue
            text = with_relative_imports(path.read_text(), name.parent.parts)
            yield name, text + FLASH_ATTN if name == Path("__init__.py") else text


def variant_name(build: NativeBuild) -> str:
    """Returns the variant's name for ``kernels``: the oldest torch that can load it, CUDA's version and the CPU."""
    major, minor = (int(TORCH_TARGET_VERSION[start : start + 2], 16) for start in (2, 4))
    cuda = f"cu{''.join(build.toolkit.version.split('.')[:2])}" if build.toolkit else "cpu"
    return f"torch-stable-abi{major}{minor}-{cuda}-{platform.machine()}-linux"


def metadata(build: NativeBuild) -> dict[str, object]:
    """Returns the content of ``metadata.json``; the id is also the name under which ``kernels`` imports the copy."""
    backend: dict[str, object] = {"type": "cpu"}
    if build.toolkit:
        code = {name for names in build.code.values() for name in names}
        ptx = {name.removeprefix("compute_") for name in code if name.startswith("compute_")}
        gpus = sorted({name.partition("_")[2] for name in code})
        archs = [re.sub(r"(\d)([a-z]?)$", r".\1\2", gpu) + ("+PTX" if gpu in ptx else "") for gpu in gpus]
        backend = {"type": "cuda", "archs": archs}
    return {
        "id": build.namespace,
        "name": "fastattn-flash2",
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": backend,
        "kernels-minver": KERNELS_MINVER,
    }


def with_own_namespace(build: NativeBuild) -> NativeBuild:
    """Returns the build with a namespace that no other version or variant of the kernel has."""
    digest = hashlib.sha256(json.dumps(build.description(), sort_keys=True).encode())
    for path in sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.read_bytes())
    for _, text in modules():
        digest.update(text.encode())
    backend = "cuda" if build.toolkit else "cpu"
    namespace = f"fastattn_{backend}_{digest.hexdigest()[:10]}"
    return dataclasses.replace(build, namespace=namespace, variant=namespace)


def write_variant(build: NativeBuild, folder: Path) -> Path:
    """Builds a variant into ``folder`` (the repository's ``build``) and returns its path."""
    build = with_own_namespace(build)
    library = build.run()
    target = folder / variant_name(build)
    shutil.rmtree(target, ignore_errors=True)
    for name, text in modules():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    (target / "namespace.py").write_text(NAMESPACE_MODULE.format(namespace=build.namespace))
    (target / "metadata.json").write_text(json.dumps(metadata(build), indent=2) + "\n")
    shutil.copy2(library, target / LIBRARY_NAME)
    shutil.rmtree(library.parent)
    return target


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="native_build.hub_kernel", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub-kernel")
    out = parser.parse_args(arguments).out
    version = importlib.metadata.version("fastattn")
    build = configure(version, os.environ)
    without_cuda = dataclasses.replace(build, toolkit=None, instances=[], output=ROOT / "build" / "native-cpu")
    for each in [build, without_cuda] if build.toolkit else [without_cuda]:
        target = write_variant(each, out / "build")
        tag = wheel_platform(f"linux_{platform.machine()}", needed_versions(target / LIBRARY_NAME))
        print(f"fastattn: {target}, for {tag}")
    (out / "README.md").write_text(CARD.format(version=version))


if __name__ == "__main__":
    main()
