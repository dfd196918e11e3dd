"""The whole of fastattn on real input: a sentence model patched and quantised, a decoder trained, quantised and served.

    python examples/demo.py

Runs sentence_embeddings.py, train_decoder.py and generate.py one after the other. The last line is ``demo: ok`` if
every check held; otherwise it names what failed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# Before torch is imported. By default its threads burn time while they wait, which they lose where cores are busy: on
# two cores with six other processes a training took eight times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import generate
import sentence_embeddings
import train_decoder
from checks import CheckList


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_decoder.add_arguments(parser)
    options = train_decoder.options_from(parser.parse_args())
    checks = CheckList()
    start = time.perf_counter()

    print("== A sentence-embedding model: patch_sdpa() and quantize_model() ==")
    sentence_embeddings.run(options.device, checks)
    print("\n== A small decoder, trained on packed batches ==")
    trained = train_decoder.run(options, checks)
    print("\n== The decoder in int8, writing with a key-value cache ==")
    prompts = generate.prompts_from(trained.held_out)
    num_tokens = min(96, options.config.max_positions - 1 - max(map(len, prompts)))
    generate.run(trained.model, trained.held_out, prompts, num_tokens, options, generate.CacheOptions(), checks)

    print(f"\nTook {time.perf_counter() - start:.0f} s")
    return checks.finish("demo")


if __name__ == "__main__":
    sys.exit(main())
