// Combines the partials of a row, which are a maximum, a sum of exponentials and sums of P·V each, and turns the
// combined partial into the row's output and LSE.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/softmax.cuh"

namespace fastattn {

FASTATTN_DEVICE float exp_of(float nats) {
    return ptx::ex2_approx_ftz_f32(nats * kLog2E);
}

// Returns exp(value - reference), or 0 if both are -inf, as they are for a row without a score.
FASTATTN_DEVICE float weight_of(float value, float reference) {
    return exp_of(value - (reference == -kInfinity ? 0.0f : reference));
}

FASTATTN_DEVICE void add_weighted(float4& sum, float weight, float4 values) {
    sum.x += weight * values.x;
    sum.y += weight * values.y;
    sum.z += weight * values.z;
    sum.w += weight * values.w;
}

// Holds four columns of a row's partial: the maximum score of some keys, the sum of exp(score - max) over these keys,
// and the sums of exp(score - max) * value.
struct RowPartial {
    float max, sum;
    float4 values;
};

// Combines two adjacent partials. Intrinsics fix which multiplications and additions are fused, and leave the compiler
// no choice, because all code that combines partials must round alike, on every GPU (partial_tree.h).
FASTATTN_DEVICE RowPartial combined(const RowPartial& left, const RowPartial& right) {
    const float max = fmaxf(left.max, right.max);
    const float left_weight = weight_of(left.max, max), right_weight = weight_of(right.max, max);
    const auto add = [&](float a, float b) { return __fmaf_rn(right_weight, b, __fmul_rn(left_weight, a)); };
    return {max,
            add(left.sum, right.sum),
            {add(left.values.x, right.values.x), add(left.values.y, right.values.y), add(left.values.z, right.values.z),
             add(left.values.w, right.values.w)}};
}

// `factor`: a row's sums of P·V, which are relative to `max`, are multiplied by it to give the output. finish_row()
// counts the sink as one more logit; it is -inf if there is none. A row without any logit gets factor 0 and lse -inf.
struct RowResult {
    float factor, lse;
};

FASTATTN_DEVICE RowResult finish_row(float max, float sum, float sink) {
    const float peak = fmaxf(max, sink);
    const float rescale = weight_of(max, peak);
    const float total = __fmaf_rn(sum, rescale, weight_of(sink, peak));  // fused, as in combined()
    if (total == 0.0f) return {0.0f, -kInfinity};
    return {rescale / total, peak == -kInfinity ? total : peak + logf(total)};
}

template <DataType kDataType>
FASTATTN_DEVICE void store_rounded(uint16_t* gOut, float4 values, float factor) {
    *reinterpret_cast<uint2*>(gOut) = {pack<kDataType>(values.x * factor, values.y * factor),
                                       pack<kDataType>(values.z * factor, values.w * factor)};
}

FASTATTN_DEVICE void store_fp32(float* gOut, float4 values, float factor) {
    *reinterpret_cast<float4*>(gOut) = {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
}

}  // namespace fastattn
