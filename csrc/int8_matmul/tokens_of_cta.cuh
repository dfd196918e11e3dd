// Quantises tokens to int8 when there are few: each CTA quantises them for itself while its first weights are in
// flight, so that no CTA waits for another.
//
// A CTA finds the largest magnitude of each whole row once. Then it quantises only the part of each row that lies in
// its own split of K, one step at a time: when the copies of a step's weights start, it quantises the step's tokens,
// which it has loaded into registers one step before. The numbers are the same as those of quantize_tokens.cuh, bit by
// bit.
//
// The two CTAs of an SM load all tokens from L2, together 4 bytes for each element, while the first 48 KB of weights of
// each CTA come from memory. These copies of weights hide the loads of tokens up to kMostElementsOfEachCta. The queue
// of quantize_tokens.cuh would cost nine trips to memory or L2, one after the other, however few tokens there are: a
// ticket, the row from memory twice, the row again from L2, stores and their fence, the count, the wait, and the tokens
// and their scales from L2.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/swizzle.cuh"
#include "host/min_max.h"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/quantize_tokens.cuh"

namespace fastattn {

struct TokensOfCtaStorage {
    uint32_t largest[kMostTokensOfEachCta];  // what each group of threads has found in its part of a row
};

// Layout, kBlockM and kBlockK describe the tokens of a stage.
template <DataType kDataType, typename Layout, int kBlockM, int kBlockK, int kThreads>
struct TokensOfCta {
    static constexpr int kRows = kMostTokensOfEachCta, kGroupThreads = kThreads / kRows;
    static constexpr int kElements = 8;  // elements that a thread loads at a time
    static constexpr bool kMayBe = kBlockM == kBlockMOfEachCta;
    static_assert(!kMayBe || kGroupThreads * kElements == kBlockK, "a group of threads has a row of a step");

    const uint16_t* gX;  // this thread's elements of the step to load next; null if the thread has no row
    int32_t left;        // elements of the row from gX on
    uint32_t offset;     // in bytes, where this thread's int8 numbers go in a stage
    Division divide;
    uint4 next;

    // Finds the scales of all rows, stores them in sTokenScale, and loads this thread's elements of the first step.
    // Called by all threads.
    FASTATTN_DEVICE void start(const MatrixView<const uint16_t>& input, int32_t begin_step, TokensOfCtaStorage& shared,
                               float* sTokenScale) {
        const int thread = threadIdx.x, group = thread / kGroupThreads, in_group = thread % kGroupThreads;
        const int32_t first_k = begin_step * kBlockK + in_group * kElements;
        gX = group < input.rows ? input.data + group * input.row_stride + first_k : nullptr;
        left = input.columns - first_k;
        offset = Layout::offset(group, in_group / 2) + in_group % 2 * kElements;
        load();

        // If there are fewer rows than groups, several groups share a row.
        const int32_t groups_of_row = input.rows == 1 ? kRows : input.rows == 2 ? kRows / 2 : input.rows <= 4 ? 2 : 1;
        const int32_t threads_of_row = groups_of_row * kGroupThreads, row = thread / threads_of_row;
        LargestMagnitude thread_largest;
        if (row < input.rows) {
            const uint16_t* gRow = input.data + row * input.row_stride;
#pragma unroll 8
            for (int32_t k = thread % threads_of_row * kElements; k < input.columns; k += threads_of_row * kElements) {
                thread_largest.follow(*reinterpret_cast<const uint4*>(gRow + k));
            }
        }
        uint32_t largest = thread_largest.bits();
#pragma unroll
        for (int distance = kGroupThreads / 2; distance > 0; distance /= 2) {
            largest = std::max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        }
        if (in_group == 0) shared.largest[group] = largest;
        __syncthreads();  // waits until every group's maximum is in shared memory
        largest = 0;
        for (int own_group = 0; own_group < groups_of_row; ++own_group) {
            if (gX != nullptr) largest = std::max(largest, shared.largest[group * groups_of_row + own_group]);
        }
        const float scale = token_scale(unpack<kDataType>(static_cast<uint16_t>(largest)));
        divide = Division(scale);
        if (in_group == 0) sTokenScale[group] = gX != nullptr ? scale_or_nan<kDataType>(scale, largest) : 0.0f;
        if (thread >= kRows && thread < kBlockM) sTokenScale[thread] = 0.0f;
    }

    // Writes zeros to the rows of a stage that have no token. Nothing else is ever written to these rows.
    FASTATTN_DEVICE void clear(char* stage) const {
        static_assert(kRows % Layout::kPeriodRows == 0, "rows below have the chunks' order of these");
        if (gX == nullptr) *reinterpret_cast<uint2*>(stage + offset) = {};
        *reinterpret_cast<uint2*>(stage + offset + kRows * Layout::kRowBytes) = {};
    }

    // Quantises the elements that were loaded last, stores them in a stage, and loads the elements of the next step.
    FASTATTN_DEVICE void store(char* stage) {
        if (gX == nullptr) return;
        *reinterpret_cast<uint2*>(stage + offset) = quantize_eight<kDataType>(next, divide);
        load();
    }

  private:
    FASTATTN_DEVICE void load() {
        next = {};
        if (gX == nullptr) return;
        if (left > 0) next = *reinterpret_cast<const uint4*>(gX);
        gX += kBlockK;
        left -= kBlockK;
    }
};

}  // namespace fastattn
