// From parts of a row, and from the maximum and the sum of its exponentials, to its result.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/softmax.cuh"

namespace fastattn {

__device__ __forceinline__ float exp_of(float nats) {
    return ptx::ex2_approx_ftz_f32(nats * kLog2E);
}

// exp(value - reference) where the reference may be -inf: then there is no value at all.
__device__ __forceinline__ float weight_of(float value, float reference) {
    return exp_of(value - (reference == -kInfinity ? 0.0f : reference));
}

__device__ __forceinline__ void add_weighted(float4& sum, float weight, float4 part) {
    sum.x += weight * part.x;
    sum.y += weight * part.y;
    sum.z += weight * part.z;
    sum.w += weight * part.w;
}

__device__ __forceinline__ float4 scaled(float4 values, float factor) {
    return {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
}

template <DataType kDataType>
__device__ __forceinline__ void store_rounded(uint16_t* gOut, float4 values, float factor) {
    const float4 out = scaled(values, factor);
    *reinterpret_cast<uint2*>(gOut) = {pack<kDataType>(out.x, out.y), pack<kDataType>(out.z, out.w)};
}

// `factor` turns sums of P·V, relative to `max`, into the output. A sink is one more logit, -inf if there is none. A
// row without a key gets 0 and -inf.
struct RowResult {
    float factor, lse;
};

__device__ __forceinline__ RowResult finish_row(float max, float sum, float sink) {
    const float peak = fmaxf(max, sink);
    const float rescale = weight_of(max, peak);
    const float total = sum * rescale + weight_of(sink, peak);
    if (total == 0.0f) return {0.0f, -kInfinity};
    return {rescale / total, peak == -kInfinity ? total : peak + logf(total)};
}

}  // namespace fastattn
