// Computes the hyperbolic tangent for softcaps, without branches. scores.cuh and transposed_options.cuh compute its
// derivative.
#pragma once

#include "device/ptx/approx.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Below this magnitude, an odd polynomial approximates tanh. Above it, the exponential does.
inline constexpr float kSmallTanh = 0.6f;

// Returns tanh(x) for |x| < kSmallTanh, and NaN for NaN: x + x^3 * p(x^2). The coefficients of p minimise the largest
// relative error, which is 9e-8 before rounding.
FASTATTN_DEVICE float small_tanh_of(float x) {
    const float square = x * x;
    const float p = fmaf(fmaf(fmaf(0.01561263f, square, -0.0522118f), square, 0.13313116f), square, -0.33332598f);
    return fmaf(p * square, x, x);
}

// Returns tanh(x): 1 or -1 for an infinity, NaN for NaN. If |x| >= kSmallTanh, it is 1 - 2 / (1 + e) with e = exp(2 x).
// For smaller |x|, the difference would cancel. Both formulas are within 6e-7 of the result.
FASTATTN_DEVICE float tanh_of(float x) {
    const float e = ptx::ex2_approx_ftz_f32(x * (2.0f * kLog2E));
    const float large = fmaf(-2.0f, ptx::rcp_approx_ftz_f32(1.0f + e), 1.0f);
    return fabsf(x) < kSmallTanh ? small_tanh_of(x) : large;
}

}  // namespace fastattn
