"""Tests of Triton kernels that do not use the package, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not on the emulator")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import triton_programs as kernels  # noqa: E402
from emulator import EmulatorError, device, launches, options  # noqa: E402

SEED = 11
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"], autouse=True)
def arch(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.manual_seed(SEED)
    with device.emulated(request.param), options.launching(seed=SEED):
        yield request.param


def small_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns integers whose products and sums are exact in every type."""
    return torch.randint(-8, 9, shape).to(dtype)


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, *FP8], ids=str)
def test_matmul(dtype: torch.dtype, transposed: bool, arch: int) -> None:
    """Checks sizes that are no multiples of the blocks."""
    if dtype == torch.float8_e4m3fn and arch == 80:
        pytest.skip("Triton has no e4m3 before sm_89")
    m, n, k = 70, 50, 90
    a, b = small_integers(m, k, dtype=dtype), small_integers(k, n, dtype=dtype)
    strided = b.T.contiguous().T if transposed else b
    out = torch.empty(m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    total = tl.int32 if dtype == torch.int8 else tl.float32
    with launches.recorded() as found:
        kernels.matmul_kernel[(2, 1)](
            a, strided, out, m, n, k, *strided.stride(), SUM=total, M_BLOCK=64, N_BLOCK=64, K_BLOCK=32
        )
    assert torch.equal(out.double(), a.double() @ b.double())
    assert found[0].report.tensor_core


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_matmul_from_registers(dtype: torch.dtype, arch: int, request: pytest.FixtureRequest) -> None:
    if arch == 90 and TRITON < (3, 8):
        reason = "the compiler leaves out the proxy fence between cp.async and wgmma, and the emulator says so"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=EmulatorError))
    a, b = small_integers(64, 64, dtype=dtype), small_integers(64, 32, dtype=dtype)
    out = torch.empty(64, 32)
    kernels.matmul_kernel[(1, 1)](
        a, b, out, 64, 32, 64, *b.stride(), SUM=tl.float32, M_BLOCK=64, N_BLOCK=32, K_BLOCK=32, DOUBLE=True
    )
    assert torch.equal(out, 2 * (a.float() @ b.float()))


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_matmul_of_descriptors_from_the_host(num_ctas: int, arch: int) -> None:
    """Checks host descriptors: tensor maps on sm_90, where two CTAs can share a tile. Outside, tensors read as zero."""
    if num_ctas > 1 and arch == 80:
        pytest.skip("sm_80 has no clusters")
    m, n, k = 100, 72, 88
    a, b = small_integers(m, k, dtype=torch.float16), small_integers(n, k, dtype=torch.float16)
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    blocks = {"M_BLOCK": 64, "N_BLOCK": 64, "K_BLOCK": 32}
    described = (
        TensorDescriptor.from_tensor(a, [64, 32]),
        TensorDescriptor.from_tensor(b, [64, 32]),
        TensorDescriptor.from_tensor(out, [64, 64]),
    )
    kernels.described_matmul_kernel[(2, 2)](*described, k, **blocks, num_ctas=num_ctas)
    assert torch.equal(out.double(), a.double() @ b.double().T)


@pytest.mark.parametrize("specialised", [False, True], ids=["", "warp-specialised"])
def test_matmul_of_descriptors_from_the_kernel(specialised: bool, arch: int, request: pytest.FixtureRequest) -> None:
    if arch == 90 and specialised and TRITON < (3, 9):
        reason = "the compiler has barriers made twice (to 3.7) or two groups of warps store the tile (3.8)"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=EmulatorError))
    m, n, k = 200, 72, 88
    a, b = small_integers(m, k, dtype=torch.bfloat16), small_integers(n, k, dtype=torch.bfloat16)
    out = torch.full((m, n), torch.nan)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.uint8))
    # 128 rows: with fewer, each of two groups of specialised warps would compute and store the whole tile.
    kernels.describing_matmul_kernel[(2, 2)](
        a, b, out, m, n, k, M_BLOCK=128, N_BLOCK=64, K_BLOCK=32, SPECIALISED=specialised
    )
    assert torch.equal(out.double(), a.double() @ b.double().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    x = (4 * torch.randn(5, 300)).to(dtype)
    out = torch.empty(5, 300)
    kernels.softmax_kernel[(5,)](x, out, 300, BLOCK=512)
    torch.testing.assert_close(out, x.float().softmax(-1), rtol=1e-5, atol=1e-7)


def test_reductions() -> None:
    x = torch.randn(16, 64).mul(8).round()  # exact sums
    sums, largest, where, running, order = (
        torch.empty(64),
        torch.empty(16),
        torch.empty(16).int(),
        *x.new_empty(2, 16, 64),
    )
    kernels.reductions_kernel[(1,)](x, sums, largest, where, running, order, ROWS=16, COLUMNS=64)
    assert torch.equal(sums, x.sum(0))
    assert torch.equal(largest, x.max(1).values)
    assert torch.equal(x.gather(1, where.long()[:, None])[:, 0], largest)
    assert torch.equal(running, x.cumsum(1))
    assert torch.equal(order, x.sort(1).values)


def test_histogram() -> None:
    values, counts = torch.randint(0, 10, (1000,), dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    kernels.histogram_kernel[(8,)](values, counts, 1000, BLOCK=128)
    assert torch.equal(counts.long(), values.bincount(minlength=10))


def test_atomics() -> None:
    x = small_integers(6, 64, dtype=torch.float32)
    total, total16, largest, guarded = torch.zeros(64), torch.zeros(64).half(), torch.full((1,), -99.0), torch.zeros(1)
    kernels.atomics_kernel[(6,)](x, total, total16, largest, torch.zeros(1).int(), guarded, BLOCK=64)
    assert torch.equal(total, x.sum(0)) and torch.equal(total16.float(), x.sum(0))
    assert largest == x.max() and guarded == x.sum()


def test_arguments() -> None:
    out = torch.zeros(10, dtype=torch.float64)
    pair = (torch.full((1,), 3.0, dtype=torch.float64), 5)
    kernels.arguments_kernel[(7,)](out, pair, None, 9 << 32, True, 0.1, 0.1, 0.1, FACTOR=0.25)
    half, brain = (torch.tensor(0.1, dtype=dtype).item() for dtype in (torch.float16, torch.bfloat16))
    assert out.tolist() == [3.0, 5.0, 1.0, 9.0, 1.0, half, brain, 0.1, 0.25, 7.0]


def test_autotuned_kernels_take_their_first_configuration() -> None:
    kernels.tuned_kernel.cache.clear()
    for size, even in ((100, 1000), (99, 0)):
        out = torch.zeros(size, dtype=torch.int32)
        with launches.recorded() as found:
            kernels.tuned_kernel[lambda meta, size=size: (triton.cdiv(size, meta["BLOCK"]),)](out, size)
        assert bool((out == 32 + even).all())
        assert [launched.block for launched in found] == [(32, 1, 1)]


def test_a_program_too_many_is_caught() -> None:
    """Checks a mask that is computed with more than the tensor's size."""
    values, counts = torch.zeros(100, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="out-of-bounds") as caught:
        kernels.histogram_kernel[(1,)](values, counts, 101, BLOCK=128)
    assert "triton_programs.py:" in (caught.value.source or "")


def test_empty_grids_launch_nothing() -> None:
    with launches.recorded() as found:
        kernels.softmax_kernel[(0,)](torch.empty(0, 300), torch.empty(0, 300), 300, BLOCK=512)
    assert not found


def test_options_reach_launches() -> None:
    x = torch.zeros(1, 300)
    with options.launching(instruction_limit=10), pytest.raises(EmulatorError, match="limit"):
        kernels.softmax_kernel[(1,)](x, x, 300, BLOCK=512)
    assert options.current().instruction_limit > 10


def test_more_shared_memory_than_the_gpu_has(arch: int) -> None:
    a = torch.zeros(64, 64, dtype=torch.float16)
    out = torch.zeros(64, 64)
    with device.emulated(arch, shared_memory_bytes=1024), pytest.raises(triton.OutOfResources, match="shared memory"):
        kernels.matmul_kernel[(1, 1)](
            a, a, out, 64, 64, 64, *a.stride(), SUM=tl.float32, M_BLOCK=64, N_BLOCK=64, K_BLOCK=32
        )
