"""Prints how launches of the CUDA C++ kernels distribute their work on an A100 and an H200.

``python -m benchmarks.machine_code.geometry decode H200`` keeps the lines that have all these words. A line describes a
case of the benchmarks' quick grids, or with ``--full`` of the full grids: the kernel, its tile, the work tiles per SM,
the CTAs launched, and the mean and the most main-loop steps of a work tile (of a CTA if the kernel distributes steps
instead of tiles). ``packed`` is how many query heads share a tile of rows. The tool leaves out cases with a window, a
bias, a mask or packed sequences, and chunked prefill. The kernels and tiles come from the library; a test compares the
numbers of CTAs with launches on the emulator.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import benchmarks.machine_code  # noqa: F401  isort: skip  (before whatever imports fastattn)

from benchmarks.measure.cases import attention, decode, int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.labels import label
from benchmarks.measure.tables import aligned
from emulator.device import USUAL
from fastattn import native
from fastattn.triton_kernels.tiles import ceil_div


class Gpu(NamedTuple):
    name: str
    arch: int
    num_sms: int
    shared_bytes: int  # the most that a CTA can have

    @property
    def facts(self) -> native.NativeDeviceFacts:
        return native.NativeDeviceFacts(self.arch, self.num_sms, 0, self.shared_bytes)


GPUS = tuple(Gpu(name, arch, *USUAL[arch]) for name, arch in (("A100", 80), ("H200", 90)))


@dataclass(frozen=True)
class Geometry:
    """Describes a launch. ``mean_steps`` and ``most_steps`` count the main-loop steps of a work tile, or of a CTA."""

    kernel: str
    tiles: int
    ctas: int
    mean_steps: float
    most_steps: int
    packed: int = 1

    @property
    def tile(self) -> str:
        known = native.KERNELS[self.kernel]
        sizes = [str(known[name]) for name in ("block_m", "block_n", "block_k") if name in known]
        return f"{'x'.join(sizes)}, {known['num_warps']} warps"


def steps_over_keys(seqlen: int, block_m: int, block_n: int, causal: bool, packed: int = 1) -> list[int]:
    """Returns how many key tiles each tile of query rows processes. Rows of ``packed`` heads are interleaved."""
    last_rows = (min(first + block_m, seqlen * packed) - 1 for first in range(0, seqlen * packed, block_m))
    return [ceil_div(last // packed + 1 if causal else seqlen, block_n) for last in last_rows]


def steps_over_queries(seqlen: int, block_m: int, block_n: int, causal: bool) -> list[int]:
    """Returns how many tiles of query rows each tile of keys processes."""
    return [ceil_div(seqlen, block_m) - (first // block_m if causal else 0) for first in range(0, seqlen, block_n)]


def packed_heads(case: AttentionCase, block_m: int) -> int:
    """Returns how many heads a tile of Hopper's forward kernel packs, as csrc/attention/forward_work_sm90.h decides."""
    group = case.heads // case.kv_heads
    can_pack = group <= 64 and group & (group - 1) == 0
    fewer = ceil_div(case.seqlen * group, block_m) < ceil_div(case.seqlen, block_m) * group
    return group if can_pack and fewer else 1


def forward(case: AttentionCase, gpu: Gpu) -> Geometry | None:
    """Returns the geometry of a forward pass, or None without a kernel. Hopper's kernel is persistent."""
    kernel = native.attention_forward_kernel(gpu.arch, gpu.shared_bytes, case.head_dim, case.head_dim, case.torch_dtype)
    if kernel is None:
        return None
    tile, is_persistent = native.KERNELS[kernel], "_sm90" in kernel
    packed = packed_heads(case, tile["block_m"]) if is_persistent else 1
    steps = steps_over_keys(case.seqlen, tile["block_m"], tile["block_n"], case.causal, packed)
    tiles = len(steps) * case.batch * case.heads // packed
    ctas = min(tiles, gpu.num_sms) if is_persistent else tiles
    return Geometry(kernel, tiles, ctas, sum(steps) / len(steps), max(steps), packed)


def backward(case: AttentionCase, gpu: Gpu) -> Geometry:
    """Returns the geometry of the kernel for dK and dV. On Hopper, several CTAs split each of the last tiles."""
    kernels = native.attention_backward_kernels(
        gpu.arch, gpu.shared_bytes, case.head_dim, case.head_dim, case.torch_dtype
    )
    kernel = next(name for name in kernels if "key_value" in name)
    tile, group = native.KERNELS[kernel], case.heads // case.kv_heads
    steps = [group * n for n in steps_over_queries(case.seqlen, tile["block_m"], tile["block_n"], case.causal)]
    tiles = ctas = len(steps) * case.batch * case.kv_heads
    if "_sm90" in kernel:
        dealt = native.backward_schedule(
            gpu.facts,
            case.head_dim,
            batch=case.batch,
            heads=case.heads,
            kv_heads=case.kv_heads,
            rows=case.seqlen,
            keys=case.seqlen,
            window=(-1, 0 if case.causal else -1),
        )
        ctas = min(dealt.first_tile + (tiles - dealt.first_tile) * dealt.over_heads * dealt.over_rows, gpu.num_sms)
    return Geometry(kernel, tiles, ctas, sum(steps) / len(steps), max(steps))


def step_of_decoding(case: DecodeCase, gpu: Gpu) -> Geometry:
    """Returns the geometry of decoding. CTAs get equal numbers of key blocks, possibly from several work tiles."""
    rows = case.heads // case.kv_heads
    kernel = native.decode_kernel(gpu.arch, gpu.shared_bytes, case.head_dim, case.torch_dtype, "16-bit", rows)
    assert kernel is not None
    capacity = case.pages_per_sequence * case.page_size if case.page_size else case.context
    dealt = native.decode_schedule(gpu.facts, case.head_dim, "16-bit", case.batch, case.kv_heads, rows, capacity)
    tile = native.KERNELS[kernel]
    row_tiles = case.kv_heads * ceil_div(rows, tile["block_m"])
    blocks = row_tiles * sum(ceil_div(length, tile["block_n"]) for length in case.lengths)
    return Geometry(kernel, row_tiles * case.batch, dealt.ctas, blocks / dealt.ctas, dealt.longest_steps)


def matmul(case: Int8Case, gpu: Gpu) -> Geometry | None:
    """Returns the geometry of an int8 matmul by a kernel for sm_80, or None if the library chooses another."""
    op = "int8_matmul_grad_input" if case.gradient else "int8_matmul"
    outputs, depth = (case.k, case.n) if case.gradient else (case.n, case.k)
    output_side, depth_side = ("block_k", "block_n") if case.gradient else ("block_n", "block_k")
    has_groups, sizes = case.group is not None, (case.m, outputs, depth)
    product = native.Int8Product(op, case.torch_dtype, has_groups, False, *sizes)
    kernel = native.int8_matmul_kernel(product, gpu.arch, gpu.num_sms)
    if kernel is None or "_sm80" not in kernel:
        return None
    dealt = native.int8_matmul_schedule(op, gpu.arch, gpu.num_sms, has_groups, *sizes)
    tile = native.KERNELS[kernel]
    tiles = ceil_div(case.m, tile["block_m"]) * ceil_div(outputs, tile[output_side])
    return Geometry(
        kernel, tiles, dealt.ctas, tiles * ceil_div(depth, tile[depth_side]) / dealt.ctas, dealt.longest_steps
    )


DEALS = {"forward": forward, "backward": backward, "decode": step_of_decoding, "int8": matmul}


def cases(full: bool) -> Iterator[tuple[str, Any]]:
    """Yields each op with each case that this tool models."""
    sequences = attention.full_cases() if full else attention.quick_cases()
    dense = [case for case in sequences if not (case.varlen or case.bias or case.mask or case.window >= 0)]
    for op in ("forward", "backward"):
        yield from ((op, case) for case in dense)
    yield from (("decode", case) for case in (decode.full_cases() if full else decode.quick_cases()))
    yield from (("int8", case) for case in (int8.full_cases() if full else int8.quick_cases()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only lines that contain all of these words")
    parser.add_argument("--full", action="store_true", help="the full grids")
    chosen = parser.parse_args(arguments)
    header = ("case", "GPU", "kernel", "tile", "packed", "tiles/SM", "CTAs", "mean steps", "most steps")
    rows = []
    for op, case in cases(chosen.full):
        for gpu in GPUS:
            dealt: Geometry | None = DEALS[op](case, gpu)  # type: ignore[operator]
            name = f"{op} {label(dataclasses.asdict(case))}"
            if dealt is None or not all(word in f"{name} {gpu.name} {dealt.kernel}" for word in chosen.words):
                continue
            numbers = (dealt.packed, f"{dealt.tiles / gpu.num_sms:.2f}", dealt.ctas, f"{dealt.mean_steps:.1f}")
            rows.append((name, gpu.name, dealt.kernel, dealt.tile, *map(str, numbers), str(dealt.most_steps)))
    print(aligned(header, rows))


if __name__ == "__main__":
    main()
