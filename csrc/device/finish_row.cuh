// Combines partial rows, each a maximum, a sum of exponentials and sums of P·V, and turns them into the result.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/softmax.cuh"

namespace fastattn {

FASTATTN_DEVICE float exp_of(float nats) {
    return ptx::ex2_approx_ftz_f32(nats * kLog2E);
}

// Returns exp(value - reference), or 0 where both are -inf because there is no value.
FASTATTN_DEVICE float weight_of(float value, float reference) {
    return exp_of(value - (reference == -kInfinity ? 0.0f : reference));
}

FASTATTN_DEVICE void add_weighted(float4& sum, float weight, float4 values) {
    sum.x += weight * values.x;
    sum.y += weight * values.y;
    sum.z += weight * values.z;
    sum.w += weight * values.w;
}

// Four columns of a row's partial: the sum of exp(score - max) over its keys, and that of exp(score - max) * value.
struct RowPartial {
    float max, sum;
    float4 values;
};

// Combines two adjacent partials. The source fixes which products and sums are one operation, and leaves the compiler
// no choice: all code that combines must round alike, on every GPU (partial_tree.h).
FASTATTN_DEVICE RowPartial combined(const RowPartial& left, const RowPartial& right) {
    const float max = fmaxf(left.max, right.max);
    const float left_weight = weight_of(left.max, max), right_weight = weight_of(right.max, max);
    const auto add = [&](float a, float b) { return __fmaf_rn(right_weight, b, __fmul_rn(left_weight, a)); };
    return {max,
            add(left.sum, right.sum),
            {add(left.values.x, right.values.x), add(left.values.y, right.values.y), add(left.values.z, right.values.z),
             add(left.values.w, right.values.w)}};
}

// `factor` turns a row's sums of P·V, which are relative to `max`, into the output. The sink is one more logit, -inf if
// there is none. A row without any logit gets factor 0 and lse -inf.
struct RowResult {
    float factor, lse;
};

FASTATTN_DEVICE RowResult finish_row(float max, float sum, float sink) {
    const float peak = fmaxf(max, sink);
    const float rescale = weight_of(max, peak);
    const float total = __fmaf_rn(sum, rescale, weight_of(sink, peak));  // one operation, as in combined()
    if (total == 0.0f) return {0.0f, -kInfinity};
    return {rescale / total, peak == -kInfinity ? total : peak + logf(total)};
}

template <DataType kDataType>
FASTATTN_DEVICE void store_rounded(uint16_t* gOut, float4 values, float factor) {
    *reinterpret_cast<uint2*>(gOut) = {pack<kDataType>(values.x * factor, values.y * factor),
                                       pack<kDataType>(values.z * factor, values.w * factor)};
}

FASTATTN_DEVICE void store_exact(float* gOut, float4 values, float factor) {
    *reinterpret_cast<float4*>(gOut) = {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
}

}  // namespace fastattn
