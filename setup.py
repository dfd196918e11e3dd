"""Builds fastattn: one native library, compiled by ninja, that serves every Python >= 3.10 and every torch >= 2.10.

C++ sources (op schemas and argument checks) need only a C++ compiler. CUDA kernels also need nvcc; without nvcc,
the package is built without these kernels. docs/environment.md lists the environment variables that steer the build.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))  # a build backend does not add this folder
from native_build.library import LIBRARY_NAME, configure
from native_build.wheel_tag import needed_versions, wheel_platform


class BuildNative(build_ext):
    """Runs ninja and puts the library where setuptools expects the package's one extension."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY_NAME))

    def build_extension(self, extension: Extension) -> None:
        build = configure(self.distribution.get_version(), os.environ)
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build.run(), target)
        if build.toolkit:
            code = ", ".join(dict.fromkeys(itertools.chain.from_iterable(build.code.values())))
            print(f"fastattn: CUDA C++ kernels ({code}), by nvcc {build.toolkit.version}")
        else:
            print("fastattn: built WITHOUT CUDA C++ kernels; `python -m fastattn` says what to do", file=sys.stderr)


class BuildPython(build_py):
    """Starts from an empty folder, so that a module that was deleted from the tree is not in the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "fastattn", ignore_errors=True)
        super().run()


class TaggedWheel(bdist_wheel):
    """Tags the wheel for any Python 3 (the library uses no Python C API) and the platform that the library needs."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath("fastattn.libfastattn"))
        return "py3", "none", wheel_platform(platform, needed_versions(library)) if library.exists() else platform


if __name__ == "__main__":
    setup(
        packages=[*find_packages("python"), "fastattn.triton_kernels"],
        ext_modules=[Extension("fastattn.libfastattn", sources=[])],
        cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": TaggedWheel},
    )
