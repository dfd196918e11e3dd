"""``python -m emulator``, with tests/ on the path: ``profile`` a script or a kernel."""

from __future__ import annotations

import argparse
import runpy
import sys

from emulator import allocations, profiling


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="sm_80, sm_90a, …")


def run_script(arguments: argparse.Namespace) -> None:
    sys.argv = [arguments.script, *arguments.arguments]
    with allocations.tracked():
        runpy.run_path(arguments.script, run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    subparsers = parser.add_subparsers(required=True)
    profiling.add_parser(subparsers, add_options, run_script)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
