// Scales of groups along K as 16-bit factors of the weights, for Hopper's matmul. A thread makes the factors of its own
// two rows of weights, and multiplies the weights by them while it decodes these.
//
// A factor is the sum of two 16-bit floats, so that a weight times its scale is rounded once, to 16 bits, as
// Int8Weight.dequantize() rounds it. The product with the smaller float is rounded too, but its error is at most 2^-8 of
// that. Factors are relative to a power of two, the divisor of their row, which puts them within fp16's range
// (factor_range.cuh). A divisor holds for a whole work tile, because the four warps of a consumer may not stop its
// products separately. So a thread first looks for the largest scale of its rows.
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/fragment.cuh"
#include "device/softmax.cuh"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/factor_range.cuh"

namespace fastattn {

// A factor for pairs of decoded weights. Each word holds the same number twice.
template <DataType kDataType>
struct GroupFactor {
    uint32_t large, small;

    FASTATTN_DEVICE void set(float factor) {
        large = pack<kDataType>(factor, factor);
        const float rest = factor - unpack<kDataType>(static_cast<uint16_t>(large));
        small = rest == rest ? pack<kDataType>(rest, rest) : 0;  // an infinite factor has no rest
    }

    FASTATTN_DEVICE uint32_t times(uint32_t pair) const {
        return fma_pairs<kDataType>(pair, large, multiply_pairs<kDataType>(pair, small));
    }
};

// The factors of a thread's two rows of weights, in one step after another of a work tile. A step has two parts of
// kSmallestGroup columns, which may belong to different groups.
template <DataType kDataType, typename Tile>
struct GroupFactors {
    static constexpr int kParts = Tile::kBlockK / Int8WeightView::kSmallestGroup;
    static_assert(kParts == 2);

    const float* gScale[2];  // of the two rows
    int32_t groups, group_shift;
    int32_t part, next_part;  // of this step, and of the step whose scales are on their way; counted from the first k
    float next[kParts][2];
    FactorRange<256> ranges[2];  // a decoded weight is at most 128, and 128 * 256 is within fp16's range
    GroupFactor<kDataType> factors[kParts][2];

    FASTATTN_DEVICE GroupFactors(const Int8WeightView& weight, const int32_t (&rows)[2], const MatmulWorkTile& work,
                                 int lane)
        : groups(weight.groups), group_shift(weight.group_shift) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            gScale[row] = weight.scale + int64_t{min(rows[row], weight.rows - 1)} * weight.groups;
        }
        part = next_part = work.begin_step * kParts;
        load_next();
        choose_divisors(work.end_step * kParts, lane);
    }

    // Returns the group's scale, or 0 for the weights past the last group, which are zero.
    FASTATTN_DEVICE float scale(int row, int32_t group) const {
        return group < groups ? __ldg(gScale[row] + group) : 0.0f;
    }

    // Chooses the divisors for the scales from this step to end_part. The four lanes of a row share its scales.
    FASTATTN_DEVICE void choose_divisors(int32_t end_part, int lane) {
        float largest[2] = {0.0f, 0.0f};
        const int32_t end = end_part - 1 >> group_shift;  // the last group
#pragma unroll 8
        for (int32_t group = (part >> group_shift) + lane % kLanesPerRow; group <= end; group += kLanesPerRow) {
#pragma unroll
            for (int row = 0; row < 2; ++row) largest[row] = fmaxf(largest[row], fabsf(scale(row, group)));
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            largest[row] = row_reduce_max(largest[row]);
            if (!ranges[row].holds(largest[row])) ranges[row].make_room(largest[row]);
        }
    }

    FASTATTN_DEVICE void load_next() {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
#pragma unroll
            for (int row = 0; row < 2; ++row) next[p][row] = scale(row, next_part + p >> group_shift);
        }
    }

    // Makes the factors of the next step, and starts to load the scales that come after them.
    FASTATTN_DEVICE void advance() {
        const bool begins_group = part == next_part;
        part += kParts;
        if (!begins_group) return;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float to_factor = ranges[row].to_factor();
#pragma unroll
            for (int p = 0; p < kParts; ++p) factors[p][row].set(next[p][row] * to_factor);
        }
        next_part = max(part, ((next_part >> group_shift) + 1) << group_shift);
        load_next();
    }
};

}  // namespace fastattn
