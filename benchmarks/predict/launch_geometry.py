"""Computes how many CTAs a launch has and how many main-loop steps each has, as the launchers divide the work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.predict.machine_model import RESERVED_SHARED_BYTES, Machine
from fastattn import native
from fastattn.profiler.work import LSE_BYTES
from fastattn.triton_kernels import tiles

ceil_div = tiles.ceil_div


@dataclass(frozen=True)
class WarpSpecialised:
    """The warps of a warp-specialised kernel: ``consumers`` warps multiply, the others copy.

    A pass of the loop has two unmasked steps, and the first step of a tile precedes the loops.
    """

    consumers: int
    query_bytes: int  # the bytes of all tiles that are copied once and not in each step


@dataclass(frozen=True)
class Geometry:
    """The CTAs and steps of one kernel's launch.

    A masked step is one that compares positions; ``step_macs`` are the multiply-adds of all warps of a CTA in a step. A
    kernel without steps is described by its bytes alone. A persistent kernel launches ``persistent`` CTAs, which take
    tiles in turn; ``ctas`` then counts the tiles, which the model deals to the SMs like CTAs. The steps of a
    warp-specialised kernel are those in its loops.
    """

    tile: str  # a description for people
    ctas: int
    mean_steps: float
    mean_masked_steps: float
    longest_steps: int
    longest_masked_steps: int
    step_macs: int
    hbm_bytes: int  # the least number of bytes that are read and written
    roles: WarpSpecialised | None = None
    persistent: int | None = None

    @property
    def launched(self) -> int:
        """The number of CTAs that are launched."""
        return self.ctas if self.persistent is None else self.persistent

    @property
    def first_steps(self) -> int:
        """The steps of each CTA outside its loops."""
        return 0 if self.roles is None else 1

    @property
    def macs(self) -> float:
        return self.ctas * (self.first_steps + self.mean_steps + self.mean_masked_steps) * self.step_macs


def streaming(hbm_bytes: int) -> Geometry:
    """Returns the geometry of a kernel that only moves data."""
    return Geometry("", 1, 0, 0, 0, 0, 0, hbm_bytes)


# --- attention -----------------------------------------------------------------------------------------------------


def steps_over_keys(seqlen: int, block_m: int, block_n: int, causal: bool, packed: int = 1) -> list[tuple[int, int]]:
    """Returns the unmasked and the masked steps of each tile of query rows that passes over its keys.

    There are ``seqlen`` queries and keys. A tile has the rows of ``packed`` heads, those of one query side by side.
    """
    found = []
    for first in range(0, seqlen * packed, block_m):
        last = min(first + block_m, seqlen * packed) - 1
        keys = last // packed + 1 if causal else seqlen
        full = (first // packed + 1 if causal else seqlen) // block_n
        found.append((full, ceil_div(keys, block_n) - full))
    return found


def steps_over_queries(seqlen: int, block_m: int, block_n: int, causal: bool) -> list[tuple[int, int]]:
    """Returns the unmasked and the masked steps of each tile of keys that passes over the queries that see it."""
    found = []
    for first in range(0, seqlen, block_n):
        last = min(first + block_n, seqlen) - 1
        begin = first // block_m if causal else 0
        full_begin = ceil_div(last, block_m) if causal else 0  # rows from the last key on see all of the tile
        full = max(seqlen // block_m - full_begin, 0)
        found.append((full, ceil_div(seqlen, block_m) - begin - full))
    return found


def _dealt(
    steps: list[tuple[int, int]], heads: int, tile: tiles.AttentionTile, step_macs: int, nbytes: int
) -> Geometry:
    unmasked, masked = (sum(column) / len(steps) for column in zip(*steps, strict=True))
    longest = max(steps, key=sum)
    name = f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps"
    if tile.num_stages:  # only Triton's tiles have stages
        name += f", {tile.num_stages} stages"
    return Geometry(name, len(steps) * heads, unmasked, masked, *longest, step_macs, nbytes)


def attention_forward(case: AttentionCase, tile: tiles.AttentionTile, width: int) -> Geometry:
    """Returns the geometry with one CTA per tile of query rows. ``width`` is the head dim that the kernel computes."""
    steps = steps_over_keys(case.seqlen, tile.block_m, tile.block_n, case.causal)
    macs = 2 * tile.block_m * tile.block_n * width
    return _dealt(steps, case.batch * case.heads, tile, macs, case.forward_work().bytes)


def native_forward_kernel(case: AttentionCase, machine: Machine) -> str | None:
    return native.attention_forward_kernel(machine.arch, case.head_dim, case.head_dim, case.torch_dtype)


def native_attention_forward(case: AttentionCase, machine: Machine) -> dict[str, Geometry]:
    """Returns the geometry of the CUDA C++ kernel that the library chooses for the GPU, by the kernel's name."""
    name = native_forward_kernel(case, machine)
    assert name is not None
    kernel, tile, width = _native_tile(name)
    geometry = attention_forward(case, tile, width)
    return {kernel: _with_roles(case, machine, tile, geometry) if kernel.endswith("_sm90") else geometry}


def _native_tile(name: str) -> tuple[str, tiles.AttentionTile, int]:
    """Returns ``attention_forward_sm80``, its tile and 64 for ``attention_forward_sm80<64, bfloat16>``."""
    kernel, _, arguments = name.partition("<")
    known = native.KERNELS[name]
    tile = tiles.AttentionTile(known["block_m"], known["block_n"], known["num_warps"], num_stages=0)
    return kernel, tile, int(arguments.split(",")[0])


def steps_in_loops(full: int, masked: int) -> tuple[int, int]:
    """Returns the unmasked and the masked steps in the loops of attention/forward_sm90.cuh for a tile with so many.

    The first step, a masked one if there is any, precedes the loops. If the number of unmasked steps is odd, the loop
    of masked steps also takes one of them.
    """
    if masked == 0:
        full -= 1
    return full - full % 2, max(masked - 1, 0) + full % 2


def _with_roles(case: AttentionCase, machine: Machine, tile: tiles.AttentionTile, geometry: Geometry) -> Geometry:
    """Returns the geometry with the roles and the steps of the kernel for sm_90a, whose warpgroups own 64 rows each."""
    packed = packed_heads(case, tile.block_m)
    every = steps_over_keys(case.seqlen, tile.block_m, tile.block_n, case.causal, packed)
    in_loops = [steps_in_loops(*steps) for steps in every]
    dealt = _dealt(in_loops, case.batch * case.heads // packed, tile, geometry.step_macs, geometry.hbm_bytes)
    query_bytes = case.batch * case.heads * case.seqlen * case.head_dim * case.torch_dtype.itemsize
    roles = WarpSpecialised(4 * (tile.block_m // 64), query_bytes)
    return replace(dealt, roles=roles, persistent=min(dealt.ctas, machine.num_sms))


def packed_heads(case: AttentionCase, block_m: int) -> int:
    """Returns how many heads a tile packs, as in csrc/attention/forward_work_sm90.h.

    It packs all heads that share a KV head if that needs fewer tiles, otherwise one head.
    """
    group = case.heads // case.kv_heads
    can_pack = group <= 64 and group & (group - 1) == 0
    fewer = ceil_div(case.seqlen * group, block_m) < ceil_div(case.seqlen, block_m) * group
    return group if can_pack and fewer else 1


def triton_attention_forward(case: AttentionCase, machine: Machine) -> dict[str, Geometry]:
    tile = tiles.attention_forward_tile(machine.arch, case.head_dim, case.head_dim)
    return {"attention_forward_kernel": attention_forward(case, tile, tiles.padded_head_dim(case.head_dim))}


def attention_backward(case: AttentionCase, machine: Machine) -> dict[str, Geometry]:
    """Returns the geometries of Triton's backward kernels, by name. Both kernels with products recompute the scores."""
    width, itemsize = tiles.padded_head_dim(case.head_dim), case.torch_dtype.itemsize
    rows = case.batch * case.heads * case.seqlen
    query_bytes = rows * case.head_dim * itemsize
    key_bytes = query_bytes // case.heads * case.kv_heads
    group = case.heads // case.kv_heads
    found = {"attention_backward_rows_kernel": streaming(2 * query_bytes + 2 * rows * LSE_BYTES)}
    shapes: tuple[tuple[tiles.BackwardKernel, Callable[..., list[tuple[int, int]]], int, int, int, int], ...] = (
        ("query", steps_over_keys, 3, case.heads, 1, 3 * query_bytes + 2 * key_bytes),
        (
            "key_value",
            steps_over_queries,
            4,
            case.kv_heads,
            group,
            2 * query_bytes + 4 * key_bytes,
        ),
    )
    for kernel, steps_of, products, heads, passes, nbytes in shapes:
        tile = tiles.attention_backward_tile(machine.arch, case.head_dim, case.head_dim, kernel)
        steps = steps_of(case.seqlen, tile.block_m, tile.block_n, case.causal)
        steps = [(passes * unmasked, passes * masked) for unmasked, masked in steps]
        macs = products * tile.block_m * tile.block_n * width
        geometry = _dealt(steps, case.batch * heads, tile, macs, nbytes + 3 * rows * LSE_BYTES)
        found[f"attention_backward_{kernel}_kernel"] = geometry
    return found


def native_attention_backward(case: AttentionCase, machine: Machine) -> dict[str, Geometry]:
    """Returns the geometries of the CUDA C++ kernels, by name.

    The first kernel prepares the rows, the second computes dK, dV and the fp32 sums of dQ, and the third dQ from these
    sums. Hopper's second kernel is persistent. Where its CTAs share the last tiles (csrc/attention/row_shares.h), the
    prediction assumes whole tiles; `backward_schedule` predicts the difference.
    """
    shared_bytes = machine.shared_bytes - RESERVED_SHARED_BYTES
    names = native.attention_backward_kernels(
        machine.arch, shared_bytes, case.head_dim, case.head_dim, case.torch_dtype
    )
    rows_kernel, key_value_kernel, query_kernel = (name.partition("<")[0] for name in names)
    _, tile, width = _native_tile(names[1])
    itemsize, rows = case.torch_dtype.itemsize, case.batch * case.heads * case.seqlen
    query_bytes = rows * case.head_dim * itemsize
    key_bytes = query_bytes // case.heads * case.kv_heads
    sums_bytes, row_bytes = rows * case.head_dim * 4, rows * LSE_BYTES
    group = case.heads // case.kv_heads
    steps = steps_over_queries(case.seqlen, tile.block_m, tile.block_n, case.causal)
    steps = [(group * unmasked, group * masked) for unmasked, masked in steps]
    macs = 5 * tile.block_m * tile.block_n * width
    nbytes = 2 * query_bytes + 4 * key_bytes + sums_bytes + 2 * row_bytes
    key_value = _dealt(steps, case.batch * case.kv_heads, tile, macs, nbytes)
    if key_value_kernel.endswith("_sm90"):
        key_value = replace(key_value, persistent=_backward_ctas(case, machine, shared_bytes, key_value.ctas))
    return {
        rows_kernel: streaming(2 * query_bytes + 3 * row_bytes),
        key_value_kernel: key_value,
        query_kernel: streaming(sums_bytes + query_bytes),
    }


def _backward_ctas(case: AttentionCase, machine: Machine, shared_bytes: int, num_tiles: int) -> int:
    """Returns how many CTAs Hopper's kernel for dK and dV launches: one for each tile or share, at most one per SM."""
    facts = native.NativeDeviceFacts(machine.arch, machine.num_sms, 0, shared_bytes)
    dealt = native.dealt_backward(
        facts,
        case.head_dim,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        rows=case.seqlen,
        keys=case.seqlen,
        window=(-1, 0 if case.causal else -1),
    )
    items = dealt.first_tile + (num_tiles - dealt.first_tile) * dealt.of_heads * dealt.of_rows
    return min(items, machine.num_sms)


# --- decode --------------------------------------------------------------------------------------------------------


def decode_tile(case: DecodeCase, machine: Machine, shared_bytes: int) -> tiles.DecodeTile:
    return tiles.decode_tile(
        machine.arch,
        case.head_dim,
        case.head_dim,
        case.heads // case.kv_heads,
        case.torch_dtype.itemsize,
        shared_bytes,
        case.page_size,
    )


def decode(case: DecodeCase, machine: Machine, shared_bytes: int) -> dict[str, Geometry]:
    """Returns the geometries of the split kernel and, if there are several splits, of the kernel that combines them."""
    tile = decode_tile(case, machine, shared_bytes)
    m_blocks = ceil_div(case.heads // case.kv_heads, tile.block_m)
    capacity = case.pages_per_sequence * case.page_size if case.page_size else case.context
    key_blocks = tiles.decode_key_blocks(capacity, 1, -1, tile.block_n)
    plan = tiles.decode_plan(case.batch, case.kv_heads, m_blocks, key_blocks, machine.num_sms, tile)
    blocks = [ceil_div(length, tile.block_n) for length in case.lengths]
    partial = plan.num_splits * case.batch * case.heads * (case.head_dim + 1) * 4 if plan.num_splits > 1 else 0
    found = {
        "split_kernel": Geometry(
            f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages, "
            f"{plan.num_splits} splits",
            case.batch * case.kv_heads * plan.num_splits * m_blocks,
            sum(blocks) / len(blocks) / plan.num_splits,
            0,
            ceil_div(max(blocks), plan.num_splits),
            0,
            tile.block_m * tile.block_n * 2 * tiles.padded_head_dim(case.head_dim),
            case.work().bytes + partial,
        )
    }
    if partial:
        out_bytes = case.batch * case.heads * case.head_dim * case.torch_dtype.itemsize
        found["combine_kernel"] = streaming(partial + out_bytes)
    return found


def native_decode(case: DecodeCase, machine: Machine) -> dict[str, Geometry]:
    """Returns the geometry of the CUDA C++ kernel, which merges the parts of a tile itself.

    Its CTAs get equal numbers of key blocks, which may belong to several tiles.
    """
    rows, shared_bytes = case.heads // case.kv_heads, machine.shared_bytes - RESERVED_SHARED_BYTES
    name = native.decode_kernel(machine.arch, shared_bytes, case.head_dim, case.torch_dtype, "16-bit", rows)
    assert name is not None
    kernel, _, arguments = name.partition("<")
    tile, width = native.KERNELS[name], int(arguments.split(",")[0])
    capacity = case.pages_per_sequence * case.page_size if case.page_size else case.context
    facts = native.NativeDeviceFacts(machine.arch, machine.num_sms, 0, shared_bytes)
    dealt = native.dealt_decode(facts, case.head_dim, "16-bit", case.batch, case.kv_heads, rows, capacity)
    row_tiles = ceil_div(rows, tile["block_m"])
    blocks = case.kv_heads * row_tiles * sum(ceil_div(length, tile["block_n"]) for length in case.lengths)
    is_shared = dealt.ctas > case.batch * case.kv_heads * row_tiles
    partial = dealt.ctas * min(rows, tile["block_m"]) * (case.head_dim + 1) * 4 if is_shared else 0
    geometry = Geometry(
        f"{tile['block_m']}x{tile['block_n']}, {tile['num_warps']} warps",
        dealt.ctas,
        blocks / dealt.ctas,
        0,
        dealt.longest_steps,
        0,
        tile["block_m"] * tile["block_n"] * 2 * width,
        case.work().bytes + partial,
    )
    return {kernel: geometry}


# --- int8 ----------------------------------------------------------------------------------------------------------


def int8_tile(case: Int8Case, machine: Machine, shared_bytes: int) -> tiles.Int8MatmulTile:
    n, k, group = (case.k, case.n, 0) if case.gradient else (case.n, case.k, case.group or 0)
    return tiles.int8_matmul_tile(machine.arch, case.m, n, k, group, shared_bytes, machine.num_sms)


def int8_matmul(case: Int8Case, machine: Machine, shared_bytes: int) -> dict[str, Geometry]:
    """Returns the geometries of the matmul or its input gradient and, if K is split, of the kernel that merges."""
    tile = int8_tile(case, machine, shared_bytes)
    n, k = (case.k, case.n) if case.gradient else (case.n, case.k)
    steps = ceil_div(k, tile.block_k)
    partial = tile.split_k * case.m * n * 4 if tile.split_k > 1 else 0
    kernel = "grad_input_kernel" if case.gradient else "forward_kernel"
    found = {
        kernel: Geometry(
            f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.num_warps} warps, {tile.num_stages} stages, "
            f"{tile.split_k} splits",
            ceil_div(case.m, tile.block_m) * ceil_div(n, tile.block_n) * tile.split_k,
            steps / tile.split_k,
            0,
            math.ceil(steps / tile.split_k),
            0,
            tile.block_m * tile.block_n * tile.block_k,
            case.work().bytes + partial,
        )
    }
    if partial:
        found["merge_kernel"] = streaming(partial + case.m * n * case.torch_dtype.itemsize)
    return found


def _native_int8_call(case: Int8Case) -> tuple[str, tuple[int, int, int]]:
    """Returns the case's op, and its tokens, its outputs and the depth of its sums."""
    if case.gradient:
        return "int8_matmul_grad_input", (case.m, case.k, case.n)
    return "int8_matmul", (case.m, case.n, case.k)


def is_int8_matmul_for_sm80(case: Int8Case, machine: Machine) -> bool:
    """Returns whether the library chooses a kernel for sm_80, and neither one of Hopper's nor cuBLAS."""
    op, sizes = _native_int8_call(case)
    has_groups = case.group is not None
    name = native.int8_matmul_kernel(op, machine.arch, machine.num_sms, case.torch_dtype, has_groups, False, *sizes)
    return name is not None and name.startswith(f"{op}_sm80")


def native_int8_matmul(case: Int8Case, machine: Machine) -> dict[str, Geometry]:
    """Returns the geometry of the CUDA C++ matmul for sm_80 or its input gradient.

    Both merge the parts of a tile themselves. Steps with group scales count as masked steps, as the matmul has a
    separate loop for them.
    """
    op, sizes = _native_int8_call(case)
    of_outputs, of_depth = ("block_k", "block_n") if case.gradient else ("block_n", "block_k")
    _, outputs, depth = sizes
    gpu, has_groups = (machine.arch, machine.num_sms), case.group is not None
    with native.forced_int8_tile(80):  # the small shape must get the same kernel as the shape that it stands for
        name = native.int8_matmul_kernel(op, *gpu, case.torch_dtype, has_groups, True, *sizes)
        assert name is not None
        dealt = native.dealt_int8_matmul(op, *gpu, has_groups, *sizes)
    tile = native.KERNELS[name]
    num_tiles = ceil_div(case.m, tile["block_m"]) * ceil_div(outputs, tile[of_outputs])
    mean = num_tiles * ceil_div(depth, tile[of_depth]) / dealt.ctas
    is_grouped = case.group is not None and not case.gradient
    kernel = name.partition("<")[0]
    plain, grouped = (0, 1) if is_grouped else (1, 0)
    partial = dealt.parts * tile["block_m"] * tile[of_outputs] * 4
    geometry = Geometry(
        f"{tile['block_m']}x{tile[of_outputs]}x{tile[of_depth]}, {tile['num_warps']} warps",
        dealt.ctas,
        plain * mean,
        grouped * mean,
        plain * dealt.longest_steps,
        grouped * dealt.longest_steps,
        tile["block_m"] * tile[of_outputs] * tile[of_depth],
        case.work().bytes + partial,
    )
    return {kernel: geometry}
