"""Defines the error that ends a build."""

from __future__ import annotations

WITHOUT_CUDA = "set FASTATTN_ARCHS=none to build without CUDA C++ kernels"


class BuildError(SystemExit):
    """Ends the build with a sentence for the person who started it, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nfastattn: {message}\n")
