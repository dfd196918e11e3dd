// Scales of groups along K as 16-bit factors of the weights, for Hopper's matmul. A thread makes the factors of its own
// two rows of weights, and multiplies the weights by them while it decodes these.
//
// A factor is the sum of two 16-bit floats, so that a weight times its scale is rounded once, to 16 bits, as
// Int8Weight.dequantize() rounds it. The product with the smaller float is rounded too, but its error is at most 2^-8
// of that. Factors are relative to a power of two, the divisor of their row (factor_range.cuh), so that no product
// overflows. In fp16 a factor has fewer digits if it is less than 2^-16 of its row's largest.
//
// A divisor holds for a whole work tile: to change it on the way, a thread would wait for its products, which all four
// warps of a consumer can only do together. So a thread first searches the scales of its rows for the largest.
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
// kSmallestGroup columns, which belong to different groups only if groups are as small.
template <DataType kDataType, typename Tile>
struct GroupFactors {
    static constexpr int kParts = Tile::kBlockK / Int8WeightView::kSmallestGroup;
    static_assert(kParts == 2);
    // A product of a factor below kEnd and a decoded weight, at most 128 in fp16 and 2 in bf16, is within the range.
    static constexpr int kEnd = kDataType == DataType::kFloat16 ? 256 : 4;

    const Int8WeightView& weight;
    const float* gScale[2];  // of the two rows
    int32_t part;            // of the next step, counted from the first k
    int32_t next_part;       // of the step whose scales are on their way
    float next[kParts][2];
    FactorRange<kEnd> ranges[2];
    GroupFactor<kDataType> factors[kParts][2];

    FASTATTN_DEVICE GroupFactors(const Int8WeightView& weight, const int32_t (&rows)[2], const MatmulWorkTile& work,
                                 int lane)
        : weight(weight), part(warp_uniform(work.begin_step * kParts)), next_part(part) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            gScale[row] = weight.scale + int64_t{min(rows[row], weight.rows - 1)} * weight.groups;
        }
        load_next();
        choose_divisors(warp_uniform(work.end_step * kParts), lane);
    }

    // Returns the group of a part.
    FASTATTN_DEVICE int32_t group_of(int32_t part) const { return part >> weight.group_shift; }
    FASTATTN_DEVICE bool has_two_groups() const { return weight.group_shift == 0; }

    // Returns a group's scale, or 0 if it is not before `end`: past the last group, weights are zero.
    FASTATTN_DEVICE float scale(int row, int32_t group, int32_t end) const {
        return group < end ? __ldg(gScale[row] + group) : 0.0f;
    }

    // Chooses the divisors for the scales from the next step to end_part. The four lanes of a row share its scales. The
    // loads of kBatch groups of each row are in flight together.
    FASTATTN_DEVICE void choose_divisors(int32_t end_part, int lane) {
        constexpr int kBatch = 16;
        const int32_t end = min(group_of(end_part - 1) + 1, weight.groups);
        float largest[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int32_t group = group_of(part); group < end; group += kBatch * kLanesPerRow) {
            float scales[kBatch][2];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int32_t own = group + i * kLanesPerRow + lane % kLanesPerRow;
                scales[i][0] = scale(0, own, end);
                scales[i][1] = scale(1, own, end);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                largest[0] = fmaxf(largest[0], fabsf(scales[i][0]));
                largest[1] = fmaxf(largest[1], fabsf(scales[i][1]));
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            largest[row] = row_reduce_max(largest[row]);
            if (!ranges[row].holds(largest[row])) ranges[row].make_room(largest[row]);
        }
    }

    FASTATTN_DEVICE void load_next() {
#pragma unroll
        for (int row = 0; row < 2; ++row) next[0][row] = scale(row, group_of(next_part), weight.groups);
        if (has_two_groups()) {
#pragma unroll
            for (int row = 0; row < 2; ++row) next[1][row] = scale(row, group_of(next_part + 1), weight.groups);
        }
    }

    // Makes the factors of the next step, and starts to load the scales that come after them.
    FASTATTN_DEVICE void advance() {
        const bool begins_group = part == next_part;
        part += kParts;
        if (!begins_group) return;
#pragma unroll
        for (int row = 0; row < 2; ++row) factors[0][row].set(next[0][row] * ranges[row].to_factor());
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            factors[1][row] = factors[0][row];
            if (has_two_groups()) factors[1][row].set(next[1][row] * ranges[row].to_factor());
        }
        next_part = max(part, group_of(next_part) + 1 << weight.group_shift);
        load_next();
    }
};

}  // namespace fastattn
