"""A process that compiles Triton kernels: requests come as pickles on its standard input, results go back the same way.

The process that runs the tests has Triton's interpreter on, and such a process cannot compile.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from typing import Any


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request["module"]), request["name"])
    source = ASTSource(kernel, request["signature"], request["constexprs"], request["attributes"])
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=request["options"])
    metadata = compiled.metadata
    scratch = [getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    return {
        "ptx": compiled.asm["ptx"],
        "name": metadata.name,
        "shared_bytes": metadata.shared,
        "threads": 32 * metadata.num_warps,
        "scratch_bytes": max(scratch),
    }


def main() -> None:
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what the compiler prints is no result
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = compile_kernel(request)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    main()
