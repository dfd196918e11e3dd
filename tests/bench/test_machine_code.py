"""Tests what the tools of `benchmarks.machine_code` print, and that launches have the geometry that they predict."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.machine_code import HAS_NATIVE  # isort: skip  (before whatever imports fastattn)

from benchmarks.machine_code import geometry, kernels
from benchmarks.machine_code.geometry import Gpu
from benchmarks.machine_code.kernels import Call
from benchmarks.measure.cases.attention import AttentionCase, multi_head
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from emulator import static_facts
from emulator.device import USUAL

needs_emulator = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run on it")
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="needs nvcc")

STEP = Call("decode", "triton", 80, DecodeCase(1, 256, heads=4, kv_heads=1))


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "expected"),
    [
        (128, 255, 64 * 1024, 2),  # 8192 registers per warp: 8 warps; 65 KB of 164
        (256, 255, 0, 1),
        (128, 32, 0, 16),  # 64 warps
        (32, 32, 0, 32),  # the maximum number of CTAs
        (128, 33, 0, 12),  # 33 * 32 = 1056 registers, allocated as 1280: 51 warps
        (128, 32, 163 * 1024, 1),
    ],
)
def test_ctas_per_sm(threads: int, registers: int, shared_bytes: int, expected: int) -> None:
    assert kernels.ctas_per_sm(80, threads, registers, shared_bytes) == expected


def test_every_op_runs_on_every_gpu_and_backend() -> None:
    found = {(call.op, call.backend, call.arch) for call in kernels.calls(full=False)}
    assert len(found) == 4 * 2 * (1 + HAS_NATIVE)


@needs_emulator
@pytest.mark.parametrize("has_tools", [True, False])
def test_both_tables(has_tools: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if has_tools and not static_facts.has_tools():
        pytest.skip("needs ptxas, cuobjdump and nvdisasm")
    monkeypatch.setattr(kernels, "calls", lambda full: [STEP, replace(STEP, arch=90)])
    monkeypatch.setattr(static_facts, "has_tools", lambda: has_tools)
    threads = torch.get_num_threads()
    kernels.main(["decode", "A100"])
    torch.set_num_threads(threads)
    code, counted = capsys.readouterr().out.split("\nCounted\n")
    assert ("machine code is not known" in code) is not has_tools and "H200" not in code + counted
    (cells,) = (line.split() for line in code.splitlines() if line.startswith("split_kernel"))
    assert cells[1].isdigit() is has_tools
    ratio = counted.split(": bytes ")[1].split(",")[0]
    assert 1 <= float(ratio) < 1.5, "a step reads each key once"


@pytest.mark.slow
@needs_emulator
@needs_native
@pytest.mark.parametrize("call", kernels.calls(full=False), ids=str)
def test_what_a_call_multiplies_and_moves(call: Call) -> None:
    """Kernels compute at least what the mathematics needs, and read at least their inputs."""
    launched, least = call.run(), call.work()
    macs = sum(part.multiply_adds for one in launched for part in one.report.tensor_core.values())
    assert 2 * macs >= least.flops and sum(one.report.global_bytes for one in launched) >= least.bytes


# --- geometry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen", [1, 64, 127, 128, 300, 512])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 64), (64, 64), (32, 64), (64, 32)])
def test_steps_are_the_tiles_that_a_mask_leaves(block_m: int, block_n: int, seqlen: int, causal: bool) -> None:
    size = -(-seqlen // 128) * 128
    seen = torch.zeros(size, size, dtype=torch.bool)
    seen[:seqlen, :seqlen] = torch.ones(seqlen, seqlen).tril().bool() if causal else True
    over_keys = geometry.steps_over_keys(seqlen, block_m, block_n, causal)
    over_queries = geometry.steps_over_queries(seqlen, block_m, block_n, causal)
    blocks = seen.view(size // block_m, block_m, size // block_n, block_n).any(3).any(1)
    assert over_keys == blocks.sum(1)[: len(over_keys)].tolist()
    assert over_queries == blocks.sum(0)[: len(over_queries)].tolist()


def test_a_tile_may_have_the_rows_of_all_heads_that_read_a_key_head() -> None:
    case = replace(multi_head(64, 1024), batch=1, heads=8, kv_heads=1, causal=True)
    # 8 * 1024 rows are 43 tiles of 192 rows; per head, they are 8 * 6 tiles. With tiles of 128 rows both are 64.
    assert [geometry.packed_heads(case, block_m) for block_m in (192, 128)] == [8, 1]
    assert geometry.packed_heads(replace(case, heads=6), 192) == 1, "6 is no power of two"
    steps = geometry.steps_over_keys(1024, 192, 96, True, packed=8)  # queries 0 to 23, 24 to 47, …
    assert len(steps) == 43 and steps[:6] == [1, 1, 1, 1, 2, 2]


@needs_native
def test_geometry_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    geometry.main(["forward", "H200", "length 16384", "full"])
    (line,) = capsys.readouterr().out.splitlines()[2:]
    kernel, tile, *numbers = re.findall(r"attention_forward_sm90<128, bfloat16>|\d+x\d+, \d+ warps|[\d.]+", line)[-7:]
    # Each of 16 heads has 128 tiles of rows, each over 128 tiles of keys; each SM runs one CTA.
    assert (kernel, tile) == ("attention_forward_sm90<128, bfloat16>", "128x128, 12 warps")
    assert numbers == ["1", f"{16 * 128 / 132:.2f}", "132", "128.0", "128"]


def test_cases_with_ranges_of_keys_are_left_out() -> None:
    """The tool counts the steps of a causal mask, and of none."""
    attention = [case for full in (False, True) for op, case in geometry.cases(full) if op in ("forward", "backward")]
    assert attention and not any(case.mask for case in attention)


SMALL: list[tuple[str, Any]] = [
    *(
        (op, AttentionCase(dim, 512, batch=1, heads=2, kv_heads=kv_heads, causal=causal))
        for op in ("forward", "backward")
        for dim in (64, 128, 256)
        for kv_heads, causal in ((1, True), (2, False))
    ),
    ("decode", DecodeCase(1, 1024, heads=4, kv_heads=1)),
    ("decode", DecodeCase(3, 512, heads=8, kv_heads=2, head_dim=64, page_size=16, ragged=True)),
    ("int8", Int8Case("small", 1, 256, 512)),
    ("int8", Int8Case("small", 16, 256, 512, granularity="128")),
    ("int8", Int8Case("small", 16, 256, 512, gradient=True)),
]


@pytest.mark.slow
@needs_emulator
@needs_native
@pytest.mark.parametrize("arch", USUAL.keys() & kernels.GPUS.keys())
@pytest.mark.parametrize(("op", "case"), SMALL, ids=str)
def test_launches_have_the_ctas_that_the_geometry_says(
    op: str, case: Any, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one SM, the forward pass's few tiles fill an A100, as the real grids' tiles do: keys are not split."""
    monkeypatch.setattr(kernels, "NUM_SMS", 1 if (op, arch) == ("forward", 80) else 2)
    gpu = Gpu("small", arch, kernels.NUM_SMS, USUAL[arch][1])
    dealt = geometry.DEALS[op](case, gpu)  # type: ignore[operator]
    assert dealt is not None
    name = dealt.kernel.partition("<")[0]
    launched = [one for one in Call(op, "cuda", arch, case).run() if name in one.report.kernel]
    assert [math.prod(one.grid) for one in launched] == [dealt.ctas]
