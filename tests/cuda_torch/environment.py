"""Makes ``.venv-cuda``: a Python with torch's CUDA build, whose CUDA is the emulator.

    python tests/cuda_torch/environment.py [--torch 2.11.0]

torch and the Triton that belongs to it come from the package registry, without NVIDIA's libraries; everything else is
that of ``.venv``, fastattn included. Run it with the Python of ``.venv``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(ROOT / "csrc")]

from cuda_torch import stand_ins  # noqa: E402
from emulator import native_library  # noqa: E402
from emulator.build import build_cudart  # noqa: E402

FOLDER = ROOT / ".venv-cuda"
DEFAULT_TORCH = "2.11.0"
# torch's hook for back ends in other packages: every process calls it after importing torch.
ENTRY_POINTS = "[torch.backends]\nemulated_cuda = cuda_torch.autoload:install\n"


def site_packages(folder: Path = FOLDER) -> Path:
    """Returns the folder of the packages of the environment ``folder``."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def nvidia_folder(packages: Path) -> Path:
    """Returns the folder where torch looks for the CUDA runtime."""
    return packages / "nvidia" / "cu13" / "lib"


def _pip(packages: Path, *requirements: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", packages, *requirements], check=True)


def _required(packages: Path, name: str) -> str:
    """Returns the requirement in torch's metadata that begins with ``name``, such as ``"triton==3.6.0"``."""
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(packages)])
    found = [text for text in torch.requires or [] if text.startswith(name)]
    if not found:
        raise SystemExit(f"this torch does not ask for {name}: is it a CUDA build?")
    return found[0].partition(";")[0].strip()


def _cudnn_version(packages: Path) -> int:
    major, minor, patch = re.findall(r"\d+", _required(packages, "nvidia-cudnn").partition("==")[2])[:3]
    return 10000 * int(major) + 100 * int(minor) + int(patch)


def make(torch: str = DEFAULT_TORCH) -> None:
    """Makes the environment with this release of torch unless it exists, and builds the libraries that it needs."""
    packages = site_packages()
    stamp = FOLDER / "torch.txt"
    if not stamp.exists() or stamp.read_text() != torch:
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", FOLDER], check=True)
        print(f"Fetching torch {torch} (about half a gigabyte) ...", flush=True)
        _pip(packages, f"torch=={torch}")
        _pip(packages, _required(packages, "triton"))
        own = packages / "emulated_cuda-0.dist-info"
        own.mkdir()
        (own / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-cuda\nVersion: 0\n")
        (own / "entry_points.txt").write_text(ENTRY_POINTS)
    # Adds the packages of .venv, fastattn among them, and the tests' folders, after the environment's own packages.
    (packages / "zz_others.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n{TESTS}\n{ROOT / 'csrc'}\n"
    )
    libraries = sorted((packages / "torch" / "lib").glob("*.so*"))
    cudart = build_cudart()
    if not (nvidia_folder(packages) / stand_ins.DRIVER).exists():
        stand_ins.make(libraries, cudart, nvidia_folder(packages), _cudnn_version(packages))
    stamp.write_text(torch)
    print("Building fastattn for it ...", flush=True)
    if native_library.build(cudart, quiet=False) is None:
        raise SystemExit("no nvcc here: the emulated device runs kernels of fastattn, which it compiles")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default=DEFAULT_TORCH, help=f"the release of torch (default {DEFAULT_TORCH})")
    make(parser.parse_args().torch)
