"""``python -m emulator``, with tests/ on the path: ``run`` a script, ``profile`` a script or a kernel."""

from __future__ import annotations

import argparse

from emulator import profiling, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    subparsers = parser.add_subparsers(required=True)
    run.add_parser(subparsers)
    profiling.add_parser(subparsers)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
