"""Converts between fp32 and fp8 (e4m3 without infinities) by integer arithmetic, which every GPU has.

Kernels get fp8 caches as uint8 tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
LEAST_NORMAL = tl.constexpr(2.0**-6)
UNIT_IS_LEAST_SUBNORMAL = tl.constexpr(2.0**14)  # in fp32 its ulp is 2^-9, the least subnormal of e4m3
BIASES = tl.constexpr((127 - 7) << 3)  # fp32's exponent bias minus e4m3's, above e4m3's 3 bits of mantissa


@triton.jit
def decode_fp8(code):
    """Returns the fp32 numbers that the uint8 codes stand for, exactly. Magnitude 0x7f is NaN.

    With the exponent in the lowest bits of fp32's exponent and the mantissa in the highest bits of fp32's mantissa, the
    bits mean the number times 2^(7 - 127).
    """
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_fp8(x):
    """Returns fp32 numbers as uint8 codes, rounded to nearest even; magnitudes above 448, infinity too, become 448, and
    NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    subnormal = (magnitude + UNIT_IS_LEAST_SUBNORMAL).to(tl.int32, bitcast=True) & 0xF
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - BIASES
    code = tl.where(magnitude < LEAST_NORMAL, subnormal, normal)
    return (sign | tl.where(x == x, code, 0x7F)).to(tl.uint8)
