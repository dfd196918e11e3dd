"""``python -m emulator``, with tests/ on the path: ``run`` a script, ``profile`` a script or a kernel, or ``build``."""

from __future__ import annotations

import argparse
import sys

from emulator import build, native_library


def build_all(arguments: argparse.Namespace) -> None:
    """Builds the emulator and fastattn's library for it, and shows the progress."""
    if native_library.build(kernels=arguments.kernels, quiet=False) is None:
        print("no nvcc here: the emulator runs Triton's kernels alone")


def main() -> None:
    if sys.argv[1:2] == ["build"]:  # before the imports below, which would build it without showing anything
        build.build(quiet=False)
    from emulator import profiling, run

    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    subparsers = parser.add_subparsers(required=True)
    run.add_parser(subparsers)
    profiling.add_parser(subparsers)
    building = subparsers.add_parser("build", help="build what the others need", description=build_all.__doc__)
    run.add_kernels(building)
    building.set_defaults(function=build_all)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
