"""Runs a benchmark or another command that measures: ``python -m benchmarks COMMAND``."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = "measure.benchmarks"  # its main takes the name of a benchmark before the arguments
# A command → the module whose ``main(arguments)`` runs it, imported only then, as some need no torch; and a summary.
COMMANDS = {
    "attention_forward": (BENCHMARKS, "attention over whole sequences, compared with every peer"),
    "attention_backward": (BENCHMARKS, "the gradients of attention, compared with every peer"),
    "decode": (BENCHMARKS, "a step of generation over a KV cache, compared with every peer"),
    "int8_matmul": (BENCHMARKS, "linear layers with int8 weights, compared with every peer"),
    "fit-int8": ("measure.int8_fit", "fits the model that chooses among int8 matmul kernels, to times on this GPU"),
    "overhead": ("measure.overhead", "what a call costs on the host; needs no GPU"),
    "emulator": ("measure.emulator_speed", "how fast the tests' emulator is; needs no GPU"),
    "page": ("measure.page", "writes docs/PERFORMANCE.md from the results"),
    "gpu-check": ("evidence.gpu_check", "all evidence that a GPU can give, in under 8 minutes"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    tools = "python -m benchmarks.machine_code.TOOL (kernels, geometry, backward_schedule): kernels without a GPU"
    head = ["usage: python -m benchmarks COMMAND [options]", ""]
    return "\n".join([*head, *lines, "", "COMMAND --help: its options", tools])


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"python -m benchmarks: there is no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    sys.argv[0] = f"python -m benchmarks {name}"  # argparse shows it as the program's name
    module, _ = COMMANDS[name]
    names = [name] if module == BENCHMARKS else []
    return importlib.import_module(f"benchmarks.{module}").main(*names, rest) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
