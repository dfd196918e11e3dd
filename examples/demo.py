"""The whole of fastattn on real input: a sentence model changed, quantised and adapted, a decoder trained and served.

    python examples/demo.py

Runs sentence_embeddings.py, lora_int8.py, train_decoder.py, generate.py and own_kernels.py one after the other, the
last of them on the tests' emulator where there is no GPU. The last line is ``demo: ok`` if every check held; otherwise
it names what failed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Before torch is imported. By default its threads burn time while they wait, which they lose where cores are busy: on
# two cores with six other processes a training took eight times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import generate
import lora_int8
import sentence_embeddings
import train_decoder
from checks import CheckList

ROOT = Path(__file__).resolve().parents[1]


def run_kernels(model: Path, checks: CheckList) -> None:
    """own_kernels.py: in this process on a GPU, else in a process whose CPU tensors are on an emulated GPU."""
    if torch.cuda.is_available():
        import own_kernels

        own_kernels.run(torch.device("cuda"), model, 4, checks)
        return
    needed = {name: importlib.util.find_spec(name) is not None for name in ("pybind11", "ninja", "triton")}
    needed["a C++ compiler"] = bool(os.environ.get("CXX")) or any(map(shutil.which, ("g++", "c++", "clang++")))
    missing = [name for name, is_there in needed.items() if not is_there]
    if missing:
        print(
            f"Left out: there is no NVIDIA GPU, and the emulator of one cannot be built without {', '.join(missing)}."
        )
        return
    print("The emulator is built first where that has not been done yet, which takes a few minutes.", flush=True)
    script = str(ROOT / "examples" / "own_kernels.py")
    command = [sys.executable, "-m", "emulator", "run", script, "--model", str(model.resolve())]
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    checks.equal("kernels on the emulated GPU: exit status", done.returncode, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_decoder.add_arguments(parser)
    options = train_decoder.options_from(parser.parse_args())
    checks = CheckList()
    start = time.perf_counter()

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
    run_kernels(options.out / "decoder.pt", checks)

    print(f"\nTook {time.perf_counter() - start:.0f} s")
    return checks.finish("demo")


if __name__ == "__main__":
    sys.exit(main())
