"""Runs five examples: they change, quantise and adapt a sentence model, train a decoder and generate text with it.

    python examples/demo.py

Runs sentence_embeddings.py, lora_int8.py, train_decoder.py, generate.py and own_kernels.py one after the other. Without
a GPU, own_kernels.py runs on the tests' emulator, which is built in the background with the kernels that it needs.
The last line is ``demo: ok`` if every check held; otherwise it names the checks that failed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

# Set this before torch is imported; train_decoder.py says why.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import generate
import lora_int8
import sentence_embeddings
import train_decoder
from checks import CheckList

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ",".join(
    [
        "forward_options_sm80.HEAD_DIM_32.PAGED_false",
        "split_sm80.HEAD_DIM_64.BLOCK_M_*.CACHE_k16Bit",
        "gemm_sm80.BLOCK_M_16",
    ]
)


SUMMARY = """
What ran where: the models on {device}, with PyTorch's own operators if there is no GPU; the kernels on {kernels}.
Next: fastattn.explain(fastattn.attention, q, k, v) says which kernel runs a call of yours, and why.
      docs/integrations.md puts fastattn into transformers, flash-attn's interface and torch with one line.
      make test runs every kernel against a float64 oracle; make bench measures (on a GPU).
"""


class Emulated:
    """Builds the tests' emulator in the background, and runs own_kernels.py on the GPU that it emulates."""

    def __init__(self, log: IO[bytes]) -> None:
        self.log = log
        self.build = self._start("build", "--kernels", KERNELS, stdout=log, stderr=subprocess.STDOUT)

    def _start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        paths = [str(ROOT / "tests"), str(ROOT / "csrc"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen([sys.executable, "-m", "emulator", *arguments], env=environment, **options)

    def run(self, model: Path, checks: CheckList) -> None:
        """Waits for the build and runs own_kernels.py with the decoder in the file ``model``."""
        if self.build.poll() is None:
            print("The emulator is still being built ...", flush=True)
        if self.build.wait() != 0:
            self.log.seek(0)
            print(self.log.read().decode(errors="replace"))
        checks.equal("building the emulator: exit status", self.build.returncode, 0)
        script = str(ROOT / "examples" / "own_kernels.py")
        run = self._start("run", "--kernels", KERNELS, script, "--model", str(model.resolve()))
        checks.equal("kernels on the emulated GPU: exit status", run.wait(), 0)


def lacks_for_emulator() -> list[str]:
    """Returns the names of the tools that the emulator needs and this machine lacks."""
    needed = {name: importlib.util.find_spec(name) is not None for name in ("pybind11", "ninja", "triton")}
    needed["a C++ compiler"] = bool(os.environ.get("CXX")) or any(map(shutil.which, ("g++", "c++", "clang++")))
    return [name for name, is_there in needed.items() if not is_there]


def run_kernels(emulated: Emulated | None, lacking: list[str], model: Path, checks: CheckList) -> None:
    """Runs own_kernels.py on this machine's GPU, or on an emulated one."""
    if torch.cuda.is_available():
        import own_kernels

        own_kernels.run(torch.device("cuda"), model, 4, checks)
    elif emulated is not None:
        emulated.run(model, checks)
    else:
        print(
            f"Left out: there is no NVIDIA GPU, and the emulator of a GPU cannot be built without {', '.join(lacking)}."
        )


def run(options: train_decoder.Options, emulated: Emulated | None, lacking: list[str], checks: CheckList) -> None:
    """Runs the examples one after the other."""
    print('== A sentence-embedding model: set_attn_implementation("fastattn") and quantize_model() ==')
    sentence_embeddings.run(options.device, checks)
    print("\n== The same model in int8 learns to sort paragraphs: LoRA ==")
    lora_int8.run(options.device, options.out, lora_int8.STEPS, checks)
    print("\n== A small decoder, trained on packed batches ==")
    trained = train_decoder.run(options, checks)
    print("\n== The decoder in int8, writing with a key-value cache ==")
    prompts = generate.prompts_from(trained.held_out)
    num_tokens = min(96, options.config.max_positions - 1 - max(map(len, prompts)))
    generate.run(trained.model, trained.held_out, prompts, num_tokens, options, generate.CacheOptions(), checks)

    print("\n== fastattn's own kernels ==")
    run_kernels(emulated, lacking, options.out / "decoder.pt", checks)
    kernels = "this machine's GPU" if torch.cuda.is_available() else "an emulated A100" if emulated else "nothing here"
    print(SUMMARY.format(device=options.device, kernels=kernels))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_decoder.add_arguments(parser)
    options = train_decoder.options_from(parser)
    checks = CheckList()
    start = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # own_kernels.py writes there too
    lacking = lacks_for_emulator()
    with tempfile.TemporaryFile() as log:
        run(options, None if lacking or torch.cuda.is_available() else Emulated(log), lacking, checks)
    print(f"Took {time.perf_counter() - start:.0f} s")
    return checks.finish("demo")


if __name__ == "__main__":
    sys.exit(main())
