"""The model that predicts times, the steps that it is told of, and how predictions are marked and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.predict import kernel_profiles  # isort: skip  (before whatever imports fastattn)

from benchmark_cases import synthetic_documents
from benchmarks.measure import tables as table
from benchmarks.measure.cases.attention import chunk, grouped, multi_head
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.predict import launch_geometry, machine_model, predictions
from benchmarks.predict import profile as predicted_profile
from benchmarks.predict.launch_geometry import Geometry
from benchmarks.predict.machine_model import (
    A100,
    H200,
    HBM,
    ISSUE,
    L2,
    SHARED,
    SPECIAL,
    TENSOR,
    Load,
    Machine,
    ctas_per_sm,
    predict,
)
from benchmarks.predict.profile import BACKWARD, CUDA, DECODE, FORWARD, INT8, TRITON, Point
from emulator.report import InstructionCounts, Report
from fastattn import native
from fastattn.triton_kernels import tiles

# Two SMs, one clock a second.
TOY = Machine("toy", 90, 2, 1.0, 4, 100, 200, 16, 1, 64, 1000.0, 100 * 1024)


# --- the model -------------------------------------------------------------------------------------------------------


def test_each_resource_by_hand() -> None:
    load = Load(instructions=40, mma_macs=1000, wgmma_macs=400, special=3, wavefronts=7, l2_bytes=160)
    seconds = predict(TOY, 2, load, load, hbm_bytes=2500).seconds_by
    # 40 / 4; 1000 / 100 + 400 / 200; 3 * 32 / 16; 7 / 1; 160 / (64 / 2); 2500 / 1000
    assert seconds == {ISSUE: 10, TENSOR: 12, SPECIAL: 6, SHARED: 7, L2: 5, HBM: 2.5}
    assert (predict(TOY, 2, load, load, 2500).resource, predict(TOY, 2, load, load, 2500).seconds) == (TENSOR, 12)
    assert predict(TOY, 2, load, load, 13000).resource == HBM


def test_published_peaks() -> None:
    """The rates are those that the data sheets add up to: dense bf16 TFLOP/s."""
    assert 2 * H200.num_sms * H200.wgmma_macs * H200.clock_hz == pytest.approx(989.4e12, rel=0.01)
    assert 2 * A100.num_sms * A100.mma_macs * A100.clock_hz == pytest.approx(312e12, rel=0.01)
    assert H200.mma_macs < H200.wgmma_macs


def test_twice_the_products_take_twice_as_long_where_they_bind() -> None:
    once, twice = Load(instructions=100, mma_macs=1e5), Load(instructions=100, mma_macs=2e5)
    for machine in (H200, A100):
        slow, slower = (predict(machine, 1000, load, load, 1.0) for load in (once, twice))
        assert slow.resource == slower.resource == TENSOR
        assert slower.seconds == pytest.approx(2 * slow.seconds)
        by_memory = [predict(machine, 1000, load, load, 1e12) for load in (once, twice)]
        assert by_memory[0].seconds == by_memory[1].seconds


def test_whole_ctas_go_to_the_busiest_sm() -> None:
    load = Load(instructions=4)
    assert [predict(TOY, ctas, load, load, 0).seconds for ctas in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert predict(TOY, 2, load, load * 3, 0).seconds == 3, "nobody is done before the longest"


def test_wgmma_only_where_there_is_one() -> None:
    load = Load(wgmma_macs=1)
    assert predict(H200, 1, load, load, 0).resource == TENSOR
    with pytest.raises(ValueError, match="A100 has no wgmma"):
        predict(A100, 1, load, load, 0)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "expected"),
    [
        (128, 255, 64 * 1024, 2),  # 8192 registers a warp: 8 warps; 65 KB of 164
        (256, 255, 0, 1),
        (128, 32, 0, 16),  # 64 warps
        (32, 32, 0, 32),  # the most there are
        (128, 33, 0, 12),  # 33 * 32 = 1056, given out as 1280: 51 warps
        (128, 32, 163 * 1024, 1),
    ],
)
def test_ctas_per_sm(threads: int, registers: int, shared_bytes: int, expected: int) -> None:
    assert ctas_per_sm(A100, threads, registers, shared_bytes) == expected


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen", [1, 64, 127, 128, 300, 512])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 64), (64, 64), (32, 64), (64, 32)])
def test_steps_are_the_tiles_that_a_mask_leaves(block_m: int, block_n: int, seqlen: int, causal: bool) -> None:
    """By the mask itself: a tile with a pair that attends is a step, unmasked if all of its columns or rows exist and
    every pair attends."""
    size = -(-seqlen // 128) * 128
    seen = torch.zeros(size, size, dtype=torch.bool)
    seen[:seqlen, :seqlen] = torch.ones(seqlen, seqlen).tril().bool() if causal else True
    over_keys, over_queries = (
        steps(seqlen, block_m, block_n, causal)
        for steps in (launch_geometry.steps_over_keys, launch_geometry.steps_over_queries)
    )
    blocks = seen.view(size // block_m, block_m, size // block_n, block_n).any(3).any(1)
    assert [sum(step) for step in over_keys] == blocks.sum(1)[: len(over_keys)].tolist()
    assert [sum(step) for step in over_queries] == blocks.sum(0)[: len(over_queries)].tolist()
    if seqlen % 128 == 0:
        whole = seen.view(size // block_m, block_m, size // block_n, block_n).all(3).all(1)
        assert [step[0] for step in over_keys] == whole.sum(1).tolist()
        assert [step[0] for step in over_queries] == whole.sum(0).tolist()


def test_geometry_by_hand() -> None:
    case = replace(multi_head(128, 256), batch=2, heads=3, kv_heads=3, causal=True)
    found = launch_geometry.attention_forward(case, tiles.AttentionTile(128, 64, 8, 2), width=128)
    # Two tiles of queries: 0 + 2 and 2 + 2 steps; two products of 128 x 64 x 128.
    assert (found.ctas, found.mean_steps, found.mean_masked_steps) == (12, 1, 2)
    assert (found.longest_steps, found.longest_masked_steps) == (2, 2)
    assert found.step_macs == 2 * 128 * 64 * 128 and found.macs == 12 * 3 * found.step_macs


def test_a_tile_may_have_the_rows_of_all_heads_that_read_a_key_head() -> None:
    case = replace(multi_head(64, 1024), batch=1, heads=8, kv_heads=1, causal=True)
    # 8 * 1024 rows are 43 tiles of 192, one head's are 6 tiles; of 128 rows either takes 64.
    assert [launch_geometry.packed_heads(case, block_m) for block_m in (192, 128)] == [8, 1]
    assert launch_geometry.packed_heads(replace(case, heads=6), 192) == 1, "6 is no power of two"
    # Queries 0 to 23, 24 to 47, …
    steps = launch_geometry.steps_over_keys(1024, 192, 96, True, packed=8)
    assert len(steps) == 43 and steps[:6] == [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("full", range(6))
@pytest.mark.parametrize("masked", range(4))
def test_steps_in_loops_are_those_that_the_kernel_takes(full: int, masked: int) -> None:
    """As the consumers of attention/forward_sm90.cuh count down: the first tile of keys, masked ones until those that
    are left are full and even in number, then two in each pass."""
    num_left = full + masked
    if num_left == 0:
        return
    num_left -= 1
    in_masked_loop = 0
    while num_left > full or num_left % 2 != 0:
        num_left, in_masked_loop = num_left - 1, in_masked_loop + 1
    assert launch_geometry.steps_in_loops(full, masked) == (num_left, in_masked_loop)


# --- loads -----------------------------------------------------------------------------------------------------------


def test_loops_of_machine_code() -> None:
    ampere = kernel_profiles.loop_of(
        ["HMMA.16816.F32.BF16"] * 3 + ["HMMA.1688.F32", "MUFU.EX2", "FFMA", "LDSM.16.M88.4"]
    )
    assert (ampere.mma_macs, ampere.wgmma_macs, ampere.instructions) == (3 * 2048 + 1024, 0, 7)
    assert ampere.mix["special function"] == 1 and ampere.tensor_share == pytest.approx(4 / 7)
    hopper = kernel_profiles.loop_of(["HGMMA.64x128x16.F32.BF16", "IADD3"])
    assert (hopper.mma_macs, hopper.wgmma_macs) == (0, 64 * 128 * 16 // 4)


def counts_of(opcode: str, warps: int, sectors: int = 0, wavefronts: int = 0) -> InstructionCounts:
    return InstructionCounts("", opcode, 1, "", warps, 32 * warps, 32 * sectors, sectors, wavefronts, 0)


def test_traffic_goes_to_the_steps_that_it_belongs_to() -> None:
    geometry = Geometry("", 2, 5, 3, 5, 3, 1, 0)  # 10 unmasked and 6 masked steps, 4 warps
    rows = (
        counts_of("ldmatrix", 40, wavefronts=400),
        counts_of("ld.shared", 24, wavefronts=60),
        counts_of("st.shared", 8, wavefronts=14),
        counts_of("cp.async.cg", 40, sectors=160, wavefronts=16),
    )
    traffic = kernel_profiles.traffic_of(Report("", rows, 0, {}), geometry, warps=4)
    assert traffic.step == Load(wavefronts=40 + 1, l2_bytes=320)
    assert traffic.masked_step == Load(wavefronts=10 + 1, l2_bytes=320)
    assert traffic.once == Load(wavefronts=7)


def test_the_difference_of_two_shapes_is_what_steps_take() -> None:
    """Wherever in the kernel it is: 2 CTAs of 4 and of 8 steps, 100 wavefronts a step and 30 more for each CTA."""
    few, more = (Geometry("", 2, steps, 0, steps, 0, 1, 0) for steps in (4, 8))
    reports = [
        Report("", (counts_of("ld.shared", 5, wavefronts=2 * (100 * steps + 30), sectors=7),), 0, {})
        for steps in (4, 8)
    ]
    profile = kernel_profiles.Profile("", 128, reports[0], few, None, (reports[1], more))
    traffic = kernel_profiles.by_difference(profile)
    assert (traffic.step.wavefronts, traffic.once.wavefronts) == (100, 30)
    assert (traffic.step.l2_bytes, traffic.once.l2_bytes) == (0, 7 * 32 / 2)


def test_what_a_warp_specialised_kernel_counted_is_dealt_by_role() -> None:
    """3 tiles, 8 consumers: 10 unmasked steps each, two in a pass, 2 masked ones, and the first. CTAs share keys."""
    geometry = Geometry("", 3, 10, 2, 10, 2, 64, 0, launch_geometry.WarpSpecialised(8, query_bytes=3 * 1280), 2)
    copied = 3 * 1280 + 39 * 2560
    rows = (
        counts_of("add.f32", 8 * 30 // 2),
        counts_of("ex2.approx.ftz.f32", 8 * 30 // 2),
        counts_of("mov.b32", 8 * 6),
        counts_of("st.global.u32", 8 * 3, sectors=48),
        replace(counts_of("cp.async.bulk.tensor.4d.multicast::cluster", 42, copied // 32), global_bytes=copied),
    )
    found = kernel_profiles.by_role(Report("", rows, 0, {}), geometry, geometry.roles)
    assert found.step == Load(instructions=8, special=4, wavefronts=2 * 2560 / 128, l2_bytes=2560)
    assert found.masked_step == Load(instructions=8, wavefronts=2 * 2560 / 128, l2_bytes=2560)
    assert found.once == Load(
        instructions=8 + 42 / 3, wavefronts=(1280 + 2 * 2560) / 128, l2_bytes=16 * 32 + 1280 + 2560
    )
    assert geometry.macs == 3 * 13 * 64 and geometry.launched == 2


def test_ctas_that_share_the_keys_of_a_tile_are_not_predicted() -> None:
    assert predicted_profile.is_modelled(replace(chunk(64, 8192), queries=0))
    assert not predicted_profile.is_modelled(chunk(64, 8192))


@pytest.mark.skipif(not kernel_profiles.HAS_NATIVE, reason="needs nvcc")
def test_int8_matmuls_are_predicted_where_a_kernel_for_sm80_computes_them() -> None:
    known = [
        (tokens, machine)
        for tokens in (16, 2048)
        for machine in (A100, H200)
        if predicted_profile.has_native_kernel(Int8Case("square", tokens, 4096, 4096), machine)
    ]
    assert known == [(16, A100), (16, H200), (2048, A100)]


# --- from kernels to predictions -------------------------------------------------------------------------------------

needs_emulator = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run on it")
needs_tools = pytest.mark.skipif(
    not kernel_profiles.static_facts.has_tools(), reason="needs ptxas, cuobjdump and nvdisasm"
)
POINTS = [
    Point(DECODE, TRITON, DecodeCase(1, 4096, heads=32), A100),
    Point(INT8, TRITON, Int8Case("square", 1, 4096, 4096), H200),
    Point(FORWARD, CUDA, replace(multi_head(64, 4096), causal=True), A100),
    Point(FORWARD, CUDA, multi_head(128, 4096), H200),
    Point(FORWARD, CUDA, replace(multi_head(64, 4096), causal=True), H200),
    Point(FORWARD, CUDA, replace(grouped(64, 4096), causal=True), H200),
    Point(BACKWARD, CUDA, replace(multi_head(64, 4096), causal=True), H200),
    Point(DECODE, CUDA, DecodeCase(1, 16384, heads=32), A100),
    Point(INT8, CUDA, Int8Case("square", 1, 4096, 4096), H200),
    Point(INT8, CUDA, Int8Case("square", 2048, 4096, 4096, granularity="64"), A100),
    Point(INT8, CUDA, Int8Case("square", 64, 4096, 4096, gradient=True), A100),
]


def forward_on(machine: Machine, head_dim: int = 128, **changes: Any) -> Point:
    return Point(FORWARD, CUDA, replace(multi_head(head_dim, 4096), **changes), machine)


needs_native = pytest.mark.skipif(not kernel_profiles.HAS_NATIVE, reason="needs nvcc")


@needs_native
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_library_says_which_kernel_a_gpu_gets_and_its_tile(head_dim: int) -> None:
    for machine, kernel in ((A100, "attention_forward_sm80"), (H200, "attention_forward_sm90")):
        (name, geometry), *others = forward_on(machine, head_dim).geometries().items()
        tile = native.KERNELS[f"{name}<{head_dim}, bfloat16>"]
        assert (name, others) == (kernel, [])
        assert geometry.tile == "{block_m}x{block_n}, {num_warps} warps".format(**tile)
        assert geometry.launched == (geometry.ctas if machine is A100 else H200.num_sms)  # persistent CTAs


@pytest.mark.slow
@needs_emulator
@needs_native
@needs_tools
def test_ctas_that_share_keys_fetch_them_once_from_the_l2() -> None:
    """Two query heads of one key head do, heads of their own with a few tiles under a causal mask do not. Into the
    shared memory of each CTA goes as much."""
    alone, shared = (forward_on(H200, causal=True, heads=16, kv_heads=heads) for heads in (16, 4))
    (tile,) = {point.geometries()["attention_forward_sm90"].tile for point in (alone, shared)}
    block_n = int(tile.split(",")[0].split("x")[1])
    found = []
    for code in predicted_profile.codes([alone, shared]).values():
        profile = code.profiles["attention_forward_sm90"]
        assert profile.counted.roles is not None and profile.redundancy == 1
        found.append(kernel_profiles.by_role(profile.counts, profile.counted, profile.counted.roles).step)
    bytes_of_keys = block_n * 2 * 128 * 2
    assert [step.l2_bytes for step in found] == [bytes_of_keys, bytes_of_keys / 2]
    assert [step.wavefronts for step in found] == [bytes_of_keys / 128] * 2


@pytest.mark.slow
@needs_emulator
@needs_native
@needs_tools
def test_products_of_the_hopper_kernel_count_at_the_rate_of_wgmma() -> None:
    point = forward_on(H200, batch=1, heads=132, kv_heads=132)
    (code,) = predicted_profile.codes([point]).values()
    (prediction,) = predicted_profile.predict_point(point, code).values()
    on_every_sm = 4 * 4096**2 * 128 / 2  # multiply-adds of both products of a head, and as many heads as SMs
    assert prediction.seconds_by[TENSOR] == pytest.approx(on_every_sm / H200.wgmma_macs / H200.clock_hz)
    (loop, *_) = kernel_profiles.loops(code.profiles["attention_forward_sm90"])
    assert loop.mma_macs == 0 and loop.wgmma_macs > 0


def longer(point: Point, factor: int) -> Point:
    case: Any = point.case
    if point.benchmark == DECODE:
        case = replace(case, context=factor * case.context)
    elif point.benchmark == INT8:
        case = replace(case, k=factor * case.k)
    else:
        case = replace(case, seqlen=factor * case.seqlen)
    return replace(point, case=case)


@pytest.mark.slow
@needs_emulator
@needs_tools
@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.benchmark} {point.machine.name}")
def test_longer_takes_longer(point: Point) -> None:
    """And no kernel is predicted to beat the machine's peak or its memory."""
    if point.implementation == CUDA and not kernel_profiles.HAS_NATIVE:
        pytest.skip("needs nvcc")
    (code,) = predicted_profile.codes([point]).values()
    times = []
    for factor in (1, 2, 4):
        one = longer(point, factor)
        kernels = predicted_profile.predict_point(one, code)
        assert kernels is not None
        times.append(sum(each.seconds for each in kernels.values()))
        peak = 2 * one.machine.num_sms * one.machine.clock_hz * max(one.machine.mma_macs, one.machine.wgmma_macs)
        assert times[-1] >= max(one.work().flops / peak, one.work().bytes / one.machine.hbm_bytes_per_s)
    assert times == sorted(times) and times[2] > 1.5 * times[1] > 2.25 * times[0]


@pytest.mark.slow
@needs_emulator
@needs_native
def test_launches_are_of_the_size_that_their_geometry_says() -> None:
    """It takes what `make bench` predicts of CUDA C++ kernels, and every backward pass; else `by_part` raises."""
    points = predicted_profile.points(full=False)
    points += [point for point in predicted_profile.points(full=True) if point.benchmark == BACKWARD]
    smalls = list(dict.fromkeys(point.small() for point in points if point.implementation == CUDA))
    persistent = 0
    for small in smalls:
        for name, (_, geometry) in predicted_profile.counted(small).by_part().items():
            persistent += name == "attention_backward_key_value_sm90" and geometry.launched < geometry.ctas
    assert len(smalls) > 20 and persistent > 0


@needs_emulator
def test_a_launch_of_another_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The geometry is checked against what the emulator ran."""
    real = launch_geometry.decode

    def off_by_one(*args: Any) -> dict[str, Geometry]:
        return {name: replace(each, ctas=each.ctas + 1) for name, each in real(*args).items()}

    monkeypatch.setattr(launch_geometry, "decode", off_by_one)
    with pytest.raises(ValueError, match="split_kernel: expected"):
        predicted_profile.codes(POINTS[:1])


@needs_emulator
@pytest.mark.parametrize("has_tools", [True, False])
def test_what_is_printed_and_written(
    has_tools: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if has_tools and not kernel_profiles.static_facts.has_tools():
        pytest.skip("needs ptxas, cuobjdump and nvdisasm")
    monkeypatch.setattr(predicted_profile, "points", lambda full: POINTS[:1])
    monkeypatch.setattr(kernel_profiles.static_facts, "has_tools", lambda: has_tools)
    threads = torch.get_num_threads()
    predicted_profile.main(["--json", str(tmp_path)])
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    heading = printed.index("PREDICTION, not measured")
    assert "predicted µs" in printed[heading:] and "predicted µs" not in printed[:heading]
    assert "split_kernel" in printed and "sectors/request" in printed
    document = predictions.read(tmp_path)
    assert document["prediction"] is True and all(case["prediction"] for case in document["cases"])
    assert ("machine code is not known" in printed) is not has_tools
    assert len(document["cases"]) == has_tools and len(document["kernels"]) == 2
    assert (document["kernels"][0]["registers"] is not None) is has_tools


# --- beside the measurement ------------------------------------------------------------------------------------------


def predicted_for(document: dict[str, Any], row: dict[str, Any], machine: str, **changes: Any) -> dict[str, Any]:
    case = {
        "prediction": True,
        "machine": machine,
        "benchmark": document["benchmark"],
        "case": row["case"],
        "implementation": row["implementation"],
        "seconds": 123.4e-6,
        "resource": HBM,
        "kernels": {},
    }
    top = {"schema": predictions.SCHEMA, "prediction": True, "date": "today", "commit": "abc"}
    return {**top, "machines": [], "kernels": [], "cases": [case | changes]}


def test_predictions_stand_beside_the_measurement() -> None:
    document = synthetic_documents()["decode"]
    document["environment"]["gpu"] = "NVIDIA H200"
    row = next(row for row in document["rows"] if row["status"] == "ok")
    shown = table.as_text(document, predicted_for(document, row, "H200"))
    assert "PREDICTION µs" in shown and shown.count("123.4") == 1 and "not measured" in shown
    assert "PREDICTION" not in table.as_text(document)
    for other in (
        predicted_for(document, row, "A100"),
        predicted_for(document, row, "H200", implementation="somebody else's"),
        predicted_for(document, row, "H200", case={**row["case"], "dtype": "another"}),
    ):
        assert "123.4" not in table.as_text(document, other)


def test_what_does_not_call_itself_a_prediction_is_refused(tmp_path: Path) -> None:
    document = synthetic_documents()["decode"]
    good = predicted_for(document, document["rows"][0], "H200")
    assert predictions.read(predictions.write(good, tmp_path)) == json.loads(json.dumps(good))
    for bad in (
        {**good, "prediction": False},
        predicted_for(document, document["rows"][0], "H200", prediction=False),
        {**good, "schema": 0},
        {key: value for key, value in good.items() if key != "prediction"},
    ):
        with pytest.raises(ValueError, match="predictions"):
            predictions.write(bad, tmp_path)


def test_machines_are_named_as_the_emulator_knows_them() -> None:
    """SMs are those that the emulated GPUs have, so that launchers deal as they would there."""
    from emulator.device import USUAL

    for machine in machine_model.MACHINES:
        usual_sms, _ = USUAL[machine.arch]
        assert machine.num_sms == usual_sms
