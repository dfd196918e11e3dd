"""Predicts the time of a flash-decoding step from what waits for what in a launch. Nothing here is measured.

``python -m benchmarks decode-time`` prints the table. The model of a launch (csrc/decode/split_sm80.cuh):

    launch → lengths → page table → K of the first step → steps → part stored → arrival → parts loaded → result
             L2        L2           device memory                 L2            L2        L2

Each of these trips waits for the one before; each merge repeats the last three. Instructions take time too: those of
the steps of the busiest SM, and those around them (the plan, queries, masks, the start of the first loads, the merge of
warps and parts). Their clocks come from a simulation of the machine code, which is right to 8 % at best. All bytes are
loaded from device memory at its data sheet's rate, which no kernel reaches.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from tabulate import tabulate

from benchmarks.predict.machine_model import H200, RESERVED_SHARED_BYTES
from fastattn import native

# Clocks that a load takes when no other load is in flight: Luo et al., arXiv 2402.13499 (H100).
L2_CLOCKS, MEMORY_CLOCKS = 263, 479
# The time between two kernels of a CUDA graph is an assumption.
LAUNCH_MICROSECONDS = 1.5
# Clocks per instruction of a warp that is alone on its scheduler: simulated, 2.8 to 3.3 in the loops of steps.
CLOCKS_OF_INSTRUCTION = 3.3

SIXTEEN, INT8, FP8 = native.CACHE_FORMATS
HEAD_DIM = 128
MERGED_AT_ONCE = 16


class Steps(NamedTuple):
    """The steps of a warp with a head dim of 128.

    A step processes ``keys`` keys with so many ``instructions``. It takes ``clocks_alone`` on an SM with one CTA, and
    ``clocks_full`` on a full SM. A key has ``key_bytes`` bytes in K and V together.
    """

    keys: int
    instructions: int
    clocks_alone: int
    clocks_full: int
    key_bytes: int

    @property
    def block(self) -> int:
        """The keys that the four warps of a CTA process in one step."""
        return 4 * self.keys


# The clocks are simulated, for the machine code of sm_90 and an H200's memory.
STEPS = {
    SIXTEEN: Steps(16, 420, 1402, 3293, 512),
    INT8: Steps(32, 980, 2478, 3171, 264),
    FP8: Steps(32, 880, 2169, 3259, 264),
}
# The instructions that a warp executes around its steps, as the emulator counted them for one sequence of 1024 tokens:
# the mean of all CTAs.
INSTRUCTIONS_AROUND = 1300


class Prediction(NamedTuple):
    """A predicted decoding step.

    ``issue`` is the share of the issue slots that instructions take while memory delivers a step's bytes, and
    ``of_memory`` is the share of the data sheet's bandwidth that is reached.
    """

    microseconds: float
    megabytes: float
    issue: float
    of_memory: float


def trips(parts: int, paged: bool) -> float:
    """Returns the microseconds of all loads and stores that wait for each other."""
    merges = math.ceil(math.log(parts, MERGED_AT_ONCE)) if parts > 1 else 0
    clocks = L2_CLOCKS * (2 + paged + 3 * merges) + MEMORY_CLOCKS
    return clocks / H200.clock_hz * 1e6


def predict(tokens: int, batch: int, group: int, cache: str, kv_heads: int = 8, paged: bool = True) -> Prediction:
    """Predicts a step with one query of ``group * kv_heads`` heads for each of ``batch`` sequences, on an H200.

    Each sequence has ``tokens`` cached tokens.
    """
    facts = native.NativeDeviceFacts(H200.arch, H200.num_sms, 0, H200.shared_bytes - RESERVED_SHARED_BYTES)
    dealt = native.dealt_decode(facts, HEAD_DIM, cache, batch, kv_heads, group, tokens)
    step = STEPS[cache]
    blocks = batch * kv_heads * math.ceil(tokens / step.block)
    ctas = math.ceil(blocks / dealt.longest_steps)
    clocks = step.clocks_alone if ctas <= H200.num_sms else step.clocks_full
    num_bytes = batch * kv_heads * tokens * step.key_bytes
    least = num_bytes / H200.hbm_bytes_per_s * 1e6
    of_steps = max(dealt.longest_steps * clocks / H200.clock_hz * 1e6, least)
    around = INSTRUCTIONS_AROUND * CLOCKS_OF_INSTRUCTION / H200.clock_hz * 1e6
    parts = math.ceil(math.ceil(tokens / step.block) / dealt.longest_steps)
    microseconds = LAUNCH_MICROSECONDS + trips(parts, paged) + around + of_steps
    slots = 4 * step.keys * step.key_bytes / (H200.hbm_bytes_per_s / H200.num_sms / H200.clock_hz)
    return Prediction(microseconds, num_bytes / 1e6, step.instructions / slots, least / microseconds)


def table() -> str:
    """Returns a table of microseconds and shares of the data sheet's bandwidth, for 8 paged KV heads of 128 dims."""
    rows = []
    for cache in STEPS:
        for batch in (1, 8, 64):
            row = [cache, str(batch)]
            for tokens in (512, 1024, 4096, 16384, 65536, 262144):
                found = predict(tokens, batch, 4, cache)
                row.append(f"{found.microseconds:.1f} ({found.of_memory:.2f})")
            rows.append(row)
    return tabulate(rows, ["cache", "batch", "512", "1k", "4k", "16k", "64k", "256k"], "pipe")


def main(arguments: list[str]) -> int:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    print("Predicted, not measured: H200, 8 KV heads of 128 dims, groups of 1 to 16 query heads.")
    for cache in STEPS:
        print(f"{cache}: {predict(1024, 1, 4, cache).issue:.2f} of the issue slots that memory leaves")
    print(f"microseconds (share of 4.8 TB/s), by tokens of each sequence\n\n{table()}")
    return 0
