// Quantises tokens to int8, in the CTAs of the matmul that needs them: q = round(x / scale), ties to even. A token's
// scale is its largest |x| divided by 127, or 1 if all of its elements are zero.
//
// If there are few tokens, each CTA quantises them for itself (tokens_of_cta.cuh, which counts the costs). Otherwise a
// CTA takes tokens from a queue until none is left, and then waits until the tokens of its tile are finished. This
// cannot deadlock: a CTA waits only for tokens that running CTAs have taken, and these CTAs finish the tokens without
// waiting for anything. A separate kernel would save one trip to the queue. But on GPUs before Hopper, it would have to
// end before the matmul loads its first weights, which are here in flight while tokens are quantised. With many tokens,
// all CTAs that fit on the GPU quantise first, as in a separate kernel, and later CTAs find the tokens finished. So one
// kernel serves any number of tokens.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "host/host_device.h"
#include "host/min_max.h"
#include "int8_matmul/int8_matmul.h"
#include "scheduler/launch_counter.cuh"

namespace fastattn {

// Divides numbers by one divisor, rounded as IEEE 754 demands. Multiplies by the divisor's reciprocal, which is rounded
// in the same way, and corrects the product twice (Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990). This code is inlined, and takes fewer instructions than CUDA's division. If the
// divisor is so small that residuals would be subnormal, dividend and divisor are scaled up.
struct Division {
    static constexpr float kSmall = 0x1p-64f, kLift = 0x1p96f;

    float lift, divisor, reciprocal;

    Division() = default;
    FASTATTN_DEVICE explicit Division(float divisor) : lift(divisor < kSmall ? kLift : 1.0f), divisor(divisor * lift) {
        const float estimate = ptx::rcp_approx_ftz_f32(this->divisor);
        reciprocal = fmaf(fmaf(-this->divisor, estimate, 1.0f), estimate, estimate);
    }

    FASTATTN_DEVICE float operator()(float x) const {
        const float lifted = x * lift;
        float quotient = lifted * reciprocal;
#pragma unroll
        for (int correction = 0; correction < 2; ++correction) {
            quotient = fmaf(fmaf(-quotient, divisor, lifted), reciprocal, quotient);
        }
        return quotient;
    }
};

// Returns largest / 127, or 1 for zeros. Scales below fp32's normal range are rounded twice.
FASTATTN_DEVICE float token_scale(float largest) {
    constexpr float kLift = 0x1p96f;
    const bool is_small = largest < 0x1p-64f;
    const float quotient = Division(127.0f)(is_small ? largest * kLift : largest);
    return largest == 0.0f ? 1.0f : is_small ? quotient * (1.0f / kLift) : quotient;
}

// Returns the scale, or NaN if an element of the token is not finite. largest: the bits of the token's largest
// magnitude.
template <DataType kDataType>
FASTATTN_DEVICE float scale_or_nan(float scale, uint32_t largest) {
    constexpr uint32_t kInfinityBits = kDataType == DataType::kFloat16 ? 0x7c00 : 0x7f80;
    return largest < kInfinityBits ? scale : __uint_as_float(0x7fffffff);
}

// Rounds to an integer, nearest even, by adding 1.5 * 2^23, and returns the bits of the sum. The lowest byte of these
// bits is the integer as int8 if -128.5 <= quotient < 127.5.
FASTATTN_DEVICE uint32_t rounded_bits(float quotient) {
    constexpr float kAmongIntegers = 0x1.8p23f;  // around it, floats are exactly the integers
    return __float_as_uint(quotient + kAmongIntegers);
}

// Quantises a pair of elements to two int8 numbers, in the lower half of the result.
template <DataType kDataType>
FASTATTN_DEVICE uint32_t quantize_pair(uint32_t pair, const Division& divide) {
    const uint32_t first = rounded_bits(divide(unpack<kDataType>(static_cast<uint16_t>(pair))));
    const uint32_t second = rounded_bits(divide(unpack<kDataType>(static_cast<uint16_t>(pair >> 16))));
    return __byte_perm(first, second, 0x0040);
}

// Quantises eight elements.
template <DataType kDataType>
FASTATTN_DEVICE uint2 quantize_eight(const uint4& eight, const Division& divide) {
    return {__byte_perm(quantize_pair<kDataType>(eight.x, divide), quantize_pair<kDataType>(eight.y, divide), 0x5410),
            __byte_perm(quantize_pair<kDataType>(eight.z, divide), quantize_pair<kDataType>(eight.w, divide), 0x5410)};
}

// The largest magnitude of 16-bit elements, as its bits. The bits of magnitudes have the order of the magnitudes;
// infinity and then NaN are the largest.
struct LargestMagnitude {
    uint32_t lower = 0, upper = 0;

    FASTATTN_DEVICE void follow(const uint4& eight) {
        const uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            lower = std::max(lower, pairs[pair] & 0x7fff);
            upper = std::max(upper, pairs[pair] & 0x7fff0000);
        }
    }

    FASTATTN_DEVICE uint32_t bits() const { return std::max(lower, upper >> 16); }
};

template <int kThreads>
struct QuantizeStorage {
    uint32_t ticket;
    uint32_t largest[kThreads / kWarpSize];  // what each warp has found in its elements of a row
};

// Quantises one row [columns] of gX to gQ and *gScale. Called by each of kGroupThreads threads, which are a whole CTA
// or a warp; `thread` is the caller's index among them. largest_of_all(x) returns the largest x of these threads.
template <DataType kDataType, int kGroupThreads, typename LargestOfAll>
FASTATTN_DEVICE void quantize_row(const uint16_t* gX, int8_t* gQ, float* gScale, int32_t columns, int32_t thread,
                                  LargestOfAll&& largest_of_all) {
    constexpr int kElements = 8;  // 16 bytes a thread
    constexpr int kLoads = kGroupThreads == kWarpSize ? 8 : 4;
    const int32_t first_column = thread * kElements;
    LargestMagnitude own_largest;
#pragma unroll kLoads
    for (int32_t column = first_column; column < columns; column += kGroupThreads * kElements) {
        own_largest.follow(*reinterpret_cast<const uint4*>(gX + column));
    }
    const uint32_t largest = largest_of_all(own_largest.bits());

    const float scale = token_scale(unpack<kDataType>(static_cast<uint16_t>(largest)));
    if (thread == 0) *gScale = scale_or_nan<kDataType>(scale, largest);
    const Division divide(scale);
#pragma unroll 2
    for (int32_t column = first_column; column < columns; column += kGroupThreads * kElements) {
        const uint4 eight = *reinterpret_cast<const uint4*>(gX + column);
        *reinterpret_cast<uint2*>(gQ + column) = quantize_eight<kDataType>(eight, divide);
    }
}

// Returns the largest of all threads' numbers to all threads of the CTA.
template <int kThreads>
FASTATTN_DEVICE uint32_t largest_of_cta(uint32_t number, QuantizeStorage<kThreads>& shared) {
    const uint32_t warp_largest = __reduce_max_sync(0xffffffff, number);
    if (threadIdx.x % kWarpSize == 0) shared.largest[threadIdx.x / kWarpSize] = warp_largest;
    __syncthreads();  // waits until every warp's maximum is in shared memory
    uint32_t largest = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarpSize; ++warp) largest = std::max(largest, shared.largest[warp]);
    return largest;
}

// Returns how many tokens a CTA takes at a time. With few tokens, all of its threads quantise a single token, which is
// finished soonest. With more tokens than CTAs can run at once, each warp quantises one token, so that one trip and one
// barrier serve several tokens.
template <int kThreads>
FASTATTN_HOST_DEVICE int32_t tokens_at_a_time(int32_t num_tokens) {
    constexpr int32_t kManyTokens = 512;
    return num_tokens < kManyTokens ? 1 : kThreads / kWarpSize;
}

// Quantises at_a_time tokens from `token` on, or as many of them as exist.
template <DataType kDataType, int kThreads>
FASTATTN_DEVICE void quantize_some(const MatrixView<const uint16_t>& input, const QuantizedTokens& out, int64_t token,
                                   int32_t at_a_time, QuantizeStorage<kThreads>& shared) {
    const int32_t thread = threadIdx.x;
    const auto quantize = [&](auto group, int64_t token, int32_t thread_of_group, auto&& largest_of_all) {
        quantize_row<kDataType, group.value>(input.data + token * input.row_stride, out.data + token * input.columns,
                                             out.scale + token, input.columns, thread_of_group, largest_of_all);
    };
    if (at_a_time == 1) {
        quantize(std::integral_constant<int, kThreads>{}, token, thread,
                 [&](uint32_t number) { return largest_of_cta<kThreads>(number, shared); });
    } else if (token + thread / kWarpSize < input.rows) {
        quantize(std::integral_constant<int, kWarpSize>{}, token + thread / kWarpSize, thread % kWarpSize,
                 [](uint32_t number) { return __reduce_max_sync(0xffffffff, number); });
    }
}

// Quantises tokens until all are taken.
template <DataType kDataType, int kBlockM, int kThreads>
FASTATTN_DEVICE void quantize_tokens(const MatrixView<const uint16_t>& input, const QuantizedTokens& out,
                                     QuantizeStorage<kThreads>& shared) {
    static_assert(kBlockM % (kThreads / kWarpSize) == 0, "what is taken at a time lies in one tile");
    const int32_t at_a_time = tokens_at_a_time<kThreads>(input.rows), thread = threadIdx.x;
    for (;;) {
        if (thread == 0) shared.ticket = LaunchCounter(out.queue, out.launch_id).count</*kOrdered=*/false>();
        __syncthreads();  // waits until the ticket is in shared memory
        const int64_t token = int64_t{shared.ticket} * at_a_time;
        if (token >= input.rows) return;
        quantize_some<kDataType>(input, out, token, at_a_time, shared);
        __syncthreads();  // waits until every thread has stored its numbers and read what is shared
        if (thread == 0) LaunchCounter(out.finished + token / kBlockM, out.launch_id).count();
    }
}

// Waits until all threads of the CTA may read a tile's tokens.
template <int kBlockM, int kThreads>
FASTATTN_DEVICE void wait_for_tokens(const QuantizedTokens& tokens, int32_t num_tokens, int32_t tile) {
    if (threadIdx.x == 0) {
        const int32_t in_tile = std::min(kBlockM, num_tokens - tile * kBlockM);
        const int32_t tickets = ceil_div(in_tile, tokens_at_a_time<kThreads>(num_tokens));
        LaunchCounter(tokens.finished + tile, tokens.launch_id).wait(tickets);
    }
    __syncthreads();  // waits until the first thread has seen all of the tile's tokens
}

// Called by one thread of each CTA when the CTA waits for no more tokens. The last CTA resets the counters to zero.
template <int kBlockM, int kThreads>
FASTATTN_DEVICE void leave_queue(const QuantizedTokens& tokens, int32_t num_tokens) {
    // The number of counts before the last one: a ticket for every at_a_time tokens, for each CTA one more ticket at
    // which it finds no tokens left, and for each other CTA the count by which it leaves.
    const uint32_t last = ceil_div(num_tokens, tokens_at_a_time<kThreads>(num_tokens)) + 2 * gridDim.x - 1;
    if (LaunchCounter(tokens.queue, tokens.launch_id).count() != last) return;
    *tokens.queue = 0;
    for (int32_t tile = 0; tile * kBlockM < num_tokens; ++tile) tokens.finished[tile] = 0;
}

}  // namespace fastattn
