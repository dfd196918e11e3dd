"""Tests the kernel repository for the Hub, loaded as ``kernels`` loads it, next to the installed package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

import installed_library
from native_build.errors import BuildError
from native_build.hub_kernel import main, metadata, modules, variant_name, with_relative_imports
from native_build.instances import all_instances
from native_build.targets import parse_targets
from native_builds import CSRC, with_kernels, without_kernels

pytestmark = pytest.mark.xdist_group("hub-kernel")  # all tests share one folder


# --- Files that are written -------------------------------------------------------------------------------------------


def test_imports_become_relative_wherever_they_stand():
    text = (
        "from fastattn import native\n"
        "from fastattn.ops.decode import (\n    a,\n)\n\n"
        "def f():\n    from fastattn.layout import b  # why\n    from torch import fastattn\n"
        "x = 'from fastattn import y'\n"
    )
    assert with_relative_imports(text, ("ops",)) == (
        "from .. import native\n"
        "from ..ops.decode import (\n    a,\n)\n\n"
        "def f():\n    from ..layout import b  # why\n    from torch import fastattn\n"
        "x = 'from fastattn import y'\n"
    )
    assert with_relative_imports("from fastattn.errors import e\n", ()) == "from .errors import e\n"


def test_an_import_that_has_no_relative_form_is_an_error():
    with pytest.raises(BuildError, match="line 2: `import fastattn` has no relative form"):
        with_relative_imports("import torch\nimport fastattn.native as native\n", ())


def _names_operators(node):
    """Returns whether a node is ``torch.ops.fastattn`` or ``torch.ops.fastattn_triton``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("fastattn")
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "ops"
    )


def test_modules_import_relatively_or_from_the_standard_library_torch_and_triton():
    # torch itself requires typing_extensions
    allowed = {*sys.stdlib_module_names, "torch", "triton", "typing_extensions"}
    names = set()
    for name, text in modules():
        names.add(name.as_posix())
        for node in ast.walk(ast.parse(text)):
            assert not _names_operators(node), f"{name}:{node.lineno}: native.OPS has them, in whatever namespace"
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [node.module]
            else:
                continue
            assert {each.split(".")[0] for each in imported} <= allowed, f"{name}:{node.lineno}"
    assert {"__init__.py", "native.py", "triton_kernels/decode.py", "integrations/flash_attn/__init__.py"} <= names
    assert not any("transformers" in name for name in names)


def test_the_variant_names_the_oldest_torch_the_cuda_version_and_the_gpus():
    assert variant_name(with_kernels()).startswith("torch-stable-abi210-cu130-")
    assert variant_name(without_kernels()).startswith("torch-stable-abi210-cpu-")
    assert metadata(with_kernels())["backend"] == {"type": "cuda", "archs": ["8.0+PTX", "9.0+PTX", "9.0a"]}
    hopper = [each for each in all_instances(CSRC) if each.architecture == "90a"]
    assert metadata(with_kernels(instances=hopper))["backend"]["archs"] == sorted(
        {"sm_90": "9.0", "sm_90a": "9.0a"}[name] for name in {code for each in hopper for code in each.code}
    )
    assert parse_targets("90a")  # a name of FASTATTN_ARCHS, as in the package's build


def test_another_namespace_compiles_the_schemas_again_and_no_kernel():
    def edges(build):
        return {line for line in build.ninja_file().splitlines() if line.startswith("build ")}

    usual, other = edges(with_kernels()), edges(with_kernels(namespace="fastattn_other", variant="other"))
    changed = {line.split(":")[0].removeprefix("build ") for line in other - usual}
    assert changed == {"other/bindings.o", "other/build_info.o", "other/libfastattn.so"}
    assert len(other & usual) > 100


# --- Loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Writes a repository as `make hub-kernel` does, with only the variant for a torch without CUDA."""
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FASTATTN_ARCHS", "none")
        main(["--out", str(folder)])
    return folder


AS_KERNELS_DOES = """
import importlib.util, json, sys
from pathlib import Path

def get_local_kernel(folder):
    (variant,) = (folder / "build").iterdir()
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
WITH_KERNELS = "from pathlib import Path\nfrom kernels import get_local_kernel\n"

USE = """
import sys

{first}
kernel = get_local_kernel(Path(sys.argv[1]))
{last}
import fastattn
import torch

assert kernel is not fastattn and "fastattn_cpu_" in kernel.__name__
ops = {{name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastattn")}}
ours = {{name for name in ops if name.startswith(kernel.__name__)}}
assert ours == {{kernel.__name__, kernel.__name__ + "_triton"}}, ops
assert ops - ours == {{"fastattn", "fastattn_triton"}}, ops
assert kernel.native.OPS is getattr(torch.ops, kernel.__name__) is not fastattn.native.OPS

query, key, value = (torch.randn(2, 5, heads, 16, requires_grad=True) for heads in (4, 2, 2))
window = dict(causal=True, window_size=(2, 0))
out = kernel.flash_attn_func(query, key, value, **window)
dense = [x.transpose(1, 2) for x in (query, key, value)]
expected = fastattn.attention(*dense, causal=True, window=(2, 0)).transpose(1, 2)
torch.testing.assert_close(out, expected)
torch.testing.assert_close(kernel.attention(*dense, causal=True, window=(2, 0)).transpose(1, 2), expected)
gradients = [torch.autograd.grad(result.sum(), (query, key, value)) for result in (out, expected)]
torch.testing.assert_close(*gradients)
offsets = torch.tensor([0, 5, 10], dtype=torch.int32)
packed = [x.flatten(0, 1) for x in (query, key, value)]
packed_out = kernel.flash_attn_varlen_func(*packed, offsets, offsets, 5, 5, **window)
torch.testing.assert_close(packed_out.view_as(expected), expected)

weight = kernel.quantize_int8(torch.randn(32, 64))
x = torch.randn(3, 64)
torch.testing.assert_close(kernel.int8_linear(x, weight), x @ weight.dequantize(torch.float32).T)
leaves = [x.detach() for x in dense]
compiled = torch.compile(kernel.attention, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(*leaves), fastattn.attention(*leaves))
with kernel.patch_sdpa(), kernel.record() as calls:
    torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
assert len(calls) == 1
assert "transformers" not in sys.modules
"""


def run(program, *arguments):
    # The variable names the installed package's library: the kernel must still load its own.
    environment = {**os.environ, "FASTATTN_LIBRARY": str(installed_library.LIBRARY_PATH)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_it_works_beside_the_installed_package_whichever_comes_first(repository, order):
    first, last = ("", "import fastattn") if order == "before" else ("import fastattn", "")
    run(AS_KERNELS_DOES + USE.format(first=first, last=last), repository)


@pytest.mark.slow
def test_the_package_kernels_loads_it(repository):
    pytest.importorskip("kernels")
    run(WITH_KERNELS + USE.format(first="", last=""), repository)


@pytest.mark.slow
def test_its_metadata_is_what_kernels_reads(repository):
    rust = pytest.importorskip("kernels._rust")
    (variant,) = (repository / "build").iterdir()
    read = rust.Metadata.read_from_file(variant / "metadata.json")
    assert read.id == json.loads((variant / "metadata.json").read_text())["id"]
    assert (read.license, read.python_depends, read.version) == ("BSD-3-Clause", [], 1)
    assert read.name.python_name.isidentifier()
    text = json.dumps(metadata(with_kernels())).encode()
    assert rust.Metadata.from_bytes(text).backend.archs == ["8.0+PTX", "9.0", "9.0a"]
