// Computes the hyperbolic tangent for softcaps, without branches. scores.cuh and transposed_options.cuh compute its
// derivative.
#pragma once

#include "device/ptx/approx.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Returns tanh(x): 1 or -1 for an infinity, NaN for NaN. If |x| >= 0.3, it is (1 - e) / (1 + e) with e = exp(-2 |x|)
// and the sign of x. For smaller |x|, 1 - e would cancel. There, tanh(x) is the Taylor series up to x^9, whose next
// term is at most 6e-8 of the result. Both formulas are within 4e-7 of the result.
FASTATTN_DEVICE float tanh_of(float x) {
    constexpr float kSmall = 0.3f;
    const float e = ptx::ex2_approx_ftz_f32(fabsf(x) * (-2.0f * kLog2E));
    const float large = copysignf((1.0f - e) * ptx::rcp_approx_ftz_f32(1.0f + e), x);
    const float square = x * x;
    const float series =
        fmaf(fmaf(fmaf(62.0f / 2835, square, -17.0f / 315), square, 2.0f / 15), square, -1.0f / 3) * square;
    return fabsf(x) < kSmall ? fmaf(series, x, x) : large;
}

}  // namespace fastattn
