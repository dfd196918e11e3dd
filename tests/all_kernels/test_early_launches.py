"""Tests of decoding and small int8 matmuls, which on Hopper may begin while the kernel before them still runs."""

from __future__ import annotations

import pytest

import fastattn
from cuda_kernels import EMULATED, MARKS, NEEDS_HOPPER, checked, only_emulated
from int8_cases import normal, quantised
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device

pytestmark = [*MARKS, NEEDS_HOPPER, only_emulated]


def products(input_precision: str) -> None:
    """Runs two matmuls; the second multiplies the result of the first."""
    x = normal(3, 256, seed=1)
    for seed in (2, 3):
        weight = fastattn.Int8Weight(*quantised(256, 256, "channel", seed=seed))
        x = fastattn.int8_linear(x, weight, input_precision=input_precision)


def steps_of_decoding(quantized: bool | str) -> None:
    """Appends a token and attends, twice. The second step reads the token that the first has appended."""
    cache = fastattn.KVCache(1, 1, 2, 64, quantized=quantized, dtype=normal(1, seed=0).dtype, device=DEVICE)
    for seed in (1, 2):
        cache.attend(0, *(normal(1, 2, 1, 64, seed=3 * seed + i) for i in range(3)))


CALLS = {
    "16-bit matmul": ("int8_matmul_sm80", lambda: products("16bit")),
    "int8 matmul": ("int8_matmul_s8_sm80", lambda: products("int8")),
    "decode": ("decode_split_sm80", lambda: steps_of_decoding(False)),
    "decode, int8": ("decode_split_sm80", lambda: steps_of_decoding("int8")),
    "decode, fp8": ("decode_split_sm80", lambda: steps_of_decoding("fp8")),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_that_does_not_wait_for_the_one_before_is_found(call: str) -> None:
    kernel, run = CALLS[call]
    with device.emulated(90, num_sms=2), fastattn.use_backend("cuda"):
        with checked():
            run()
        missing = cuda_runtime.replaced("griddepcontrol.wait;", "", kernel)
        with pytest.raises(EmulatorError, match="the launch before") as caught, checked(), missing:
            run()
    assert caught.value.kind == "race"


@pytest.mark.parametrize("call", CALLS)
def test_kernels_of_earlier_gpus_begin_one_after_the_other(call: str) -> None:
    """Their code cannot wait; griddepcontrol is an instruction of sm_90."""
    with device.emulated(80, num_sms=2), fastattn.use_backend("cuda"), checked():
        CALLS[call][1]()
