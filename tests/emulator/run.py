"""``python -m emulator run script.py …``: runs a Python script with its CUDA and Triton kernels on the emulator.

fastattn and all Triton kernels take CPU tensors, and fastattn's dispatcher sees the emulated GPU. Autotuned kernels use
their first configuration. A kernel may touch all memory that torch allocated since the start of the script; its
mistakes raise an `EmulatorError`.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any

from emulator import allocations, cuda_runtime, device, native_library, options

ARCHS = {"sm_80": 80, "sm_90": 90, "sm_90a": 90}


def existing_file(text: str) -> Path:
    """Parses a command-line argument that names an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def positive(text: str) -> int:
    """Parses a command-line argument that is an integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def natural(text: str) -> int:
    """Parses a command-line argument that is an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return int(text)


def kernel_patterns(text: str) -> list[str]:
    """Parses a command-line argument with comma-separated patterns of fastattn's kernels."""
    patterns = [pattern for pattern in text.split(",") if pattern]
    try:
        native_library.kernels_named(patterns)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return patterns


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--kernels``, which selects the CUDA C++ kernels of fastattn to compile."""
    parser.add_argument(
        "--kernels",
        type=kernel_patterns,
        default=[],
        metavar="PATTERN,…",
        help="compile only these of fastattn's kernels, by the beginning of a name or with *: "
        "forward_options_sm80.HEAD_DIM_32,gemm_sm80 (default: all)",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the emulated GPU and for launches."""
    parser.add_argument("--arch", choices=ARCHS, help="the emulated GPU (default sm_80)")
    usual_sms = "default 108 on sm_80, 132 on sm_90"
    parser.add_argument("--sms", type=positive, metavar="N", help=f"its multiprocessors ({usual_sms})")
    parser.add_argument("--shared-memory", type=positive, metavar="BYTES", help="that one block may have")
    parser.add_argument("--seed", type=natural, default=0, help="of what the hardware leaves open (default 0)")
    parser.add_argument("--no-races", action="store_true", help="accesses that nothing orders are no error")
    parser.add_argument("--uninitialised", action="store_true", help="reading shared memory nobody wrote is an error")
    parser.add_argument("--ordered-sums", action="store_true", help="floating sums in no certain order are an error")
    strict = "asynchronous copies over what was read want a proxy fence"
    parser.add_argument("--strict-proxy-reads", action="store_true", help=strict)
    parser.add_argument("--unawaited", action="store_true", help="arrivals nobody waits for are an error")
    waits = "a wait for wgmma tells of its own warp's part, not of the warpgroup's"
    parser.add_argument("--wgmma-waits-by-warp", action="store_true", help=waits)


def run_script(arguments: argparse.Namespace) -> None:
    """Runs ``arguments.script`` as ``__main__`` with ``arguments.arguments`` and the options of `add_options`."""
    script = str(arguments.script)
    native_library.import_fastattn(arguments.kernels)
    with contextlib.ExitStack() as stack:
        # Entered first, because launches only know the tensors that are allocated after this.
        stack.enter_context(allocations.tracked())
        stack.enter_context(device.emulated(ARCHS[arguments.arch or "sm_80"], arguments.sms, arguments.shared_memory))
        races = False if arguments.no_races else None
        names = ("seed", "uninitialised", "unawaited", "ordered_sums", "strict_proxy_reads", "wgmma_waits_by_warp")
        launching = {name: getattr(arguments, name) for name in names}
        stack.enter_context(options.launching(**launching, races=races, tracked=True))
        sys.argv = [script, *arguments.arguments]
        sys.path.insert(0, str(Path(script).resolve().parent))
        with cuda_runtime.raising_faults():
            runpy.run_path(script, run_name="__main__")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a Python script with its CUDA and Triton kernels on the emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    add_kernels(parser)
    parser.add_argument("script", type=existing_file, help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
    parser.set_defaults(function=run_script)
