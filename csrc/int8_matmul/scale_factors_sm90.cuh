// Converts scales to 16-bit factors of the weights, for Hopper's kernel of the input gradient. A warp writes a step's
// factors to shared memory, in the order in which wgmma's lanes need them. Consumers multiply weights by factors while
// they decode the weights.
//
// With fp16, a weight w is decoded and then multiplied by its factor f (device/dequantize.cuh). With bf16, one
// multiply-add does both, because the offset of 128 is a power of two. It rounds once, as a product of f and w would.
// In the following, b = w + 128, and f * 2^125 and f / 2 are exact in bf16:
//
//   b * 2^-133 * (f * 2^125) - f / 2 = f * w / 256
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/factor_range.cuh"

namespace fastattn {

// Decodes weights and multiplies them by their factors. Words holds the factors of two adjacent n.
template <DataType kDataType>
struct ScaledDecoding;

template <>
struct ScaledDecoding<DataType::kFloat16> {
    using Words = uint32_t;
    static constexpr int kWords = sizeof(Words) / 4;
    static constexpr int kEnd = 256;        // a factor times 128 is within fp16's range
    static constexpr float kFactor = 1.0f;  // a decoded number times this is f * w

    FASTATTN_DEVICE static Words make(float first, float second) { return pack<DataType::kFloat16>(first, second); }

    template <int kFirst, int kSecond>
    FASTATTN_DEVICE static uint32_t decode(uint32_t four_biased, const uint32_t* words) {
        return multiply_pairs<DataType::kFloat16>(decode_pair<DataType::kFloat16, kFirst, kSecond>(four_biased),
                                                  words[0]);
    }
};

template <>
struct ScaledDecoding<DataType::kBFloat16> {
    using Words = uint64_t;  // multipliers; offsets in the upper half. One store: nvcc may make two of a uint2
    static constexpr int kWords = sizeof(Words) / 4;
    static constexpr int kEnd = 4;  // 4 * 2^125 is within bf16's range
    static constexpr float kFactor = 256.0f;

    FASTATTN_DEVICE static Words make(float first, float second) {
        constexpr uint32_t kTo125 = 0x7e007e00, kMinusHalf = 0xbf00bf00;
        const uint32_t factors = pack<DataType::kBFloat16>(first, second);
        const Words offsets = multiply_pairs<DataType::kBFloat16>(factors, kMinusHalf);
        return offsets << 32 | multiply_pairs<DataType::kBFloat16>(factors, kTo125);
    }

    template <int kFirst, int kSecond>
    FASTATTN_DEVICE static uint32_t decode(uint32_t four_biased, const uint32_t* words) {
        return fma_pairs<DataType::kBFloat16>(linear_pair<DataType::kBFloat16, kFirst, kSecond>(four_biased), words[0],
                                              words[1]);
    }
};

inline constexpr int kStepN = 2 * kWarpSize;  // the N of a step: a lane makes the factors of two n
inline constexpr int kMostGroups = kCtaN / Int8WeightView::kSmallestGroup;

// The factors of a step, for each group of the CTA's columns. Of the four lanes of a row of operand A, lane t needs n =
// 2t and 2t + 1 of each 8. A lane's words for all these pairs form vectors of four words. The i-th vectors of the four
// lanes are adjacent.
template <DataType kDataType>
struct alignas(16) StepFactors {
    using Decoding = ScaledDecoding<kDataType>;
    static constexpr int kLaneWords = kStepN / kMmaN * Decoding::kWords;

    uint32_t words[kMostGroups][kLaneWords / 4][kLanesPerRow][4];
    float divisors[kMostGroups];
    int32_t has_changed;  // whether some divisor differs from the step before

    // Stores the factors of n = 2 * lane and n = 2 * lane + 1.
    FASTATTN_DEVICE void store(int group, int lane, float first, float second) {
        const int word = lane / kLanesPerRow * Decoding::kWords;
        uint32_t* destination = &words[group][word / 4][lane % kLanesPerRow][word % 4];
        *reinterpret_cast<typename Decoding::Words*>(destination) = Decoding::make(first, second);
    }

    FASTATTN_DEVICE void load(uint32_t (&own)[kLaneWords], int group, int lane) const {
#pragma unroll
        for (int i = 0; i < kLaneWords / 4; ++i) {
            const uint4 four = *reinterpret_cast<const uint4*>(words[group][i][lane % kLanesPerRow]);
            own[4 * i] = four.x, own[4 * i + 1] = four.y, own[4 * i + 2] = four.z, own[4 * i + 3] = four.w;
        }
    }
};

// The scales in flight from global memory: kScaleSteps steps of kMostGroups groups each.
inline constexpr int kScaleSteps = 4;
using ScaleSteps = float[kScaleSteps][kMostGroups][kStepN];

// Makes the factors of all steps, and copies their scales a few steps ahead. Called by one warp.
template <DataType kDataType, typename Tile>
FASTATTN_DEVICE void make_factors(const RingBarriers<Tile::kNumStages>& barriers,
                                  StepFactors<kDataType> (&stages)[Tile::kNumStages], ScaleSteps& sScales,
                                  const ClusterParams& params, int rank, int lane) {
    static_assert(Tile::kBlockK == kStepN);
    const MatmulSchedule& schedule = params.matmul.epilogue.schedule;
    const Int8WeightView& weight = params.matmul.weight;
    const int num_groups = ((kMostGroups - 1) >> weight.group_shift) + 1;
    Ring<Tile::kNumStages> ring(barriers);
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) {
        const CtaTile tile(schedule, work, rank);
        const int32_t first_group = tile.n_tile * kMostGroups >> weight.group_shift;
        const auto copy = [&](int32_t step) {
            if (step < work.end_step) {
                uint32_t destination = shared_address(&sScales[step % kScaleSteps][0][lane]);
#pragma unroll 1
                for (int group = 0; group < num_groups; ++group) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int32_t n = step * kStepN + half * kWarpSize + lane;
                        const bool exists = n < weight.rows && first_group + group < weight.groups;
                        const float* scale = weight.scale + int64_t{n} * weight.scale_row_stride + first_group + group;
                        ptx::cp_async_ca_4(destination, scale, exists ? sizeof(float) : 0);
                        destination += kWarpSize * sizeof(float);
                    }
                }
            }
            ptx::cp_async_commit_group();
        };

        FactorRange<ScaledDecoding<kDataType>::kEnd> ranges[kMostGroups];
#pragma unroll 1
        for (int i = 0; i < kScaleSteps; ++i) copy(work.begin_step + i);
#pragma unroll 1
        for (int32_t step = work.begin_step; step < work.end_step; ++step) {
            ptx::cp_async_wait_group<kScaleSteps - 1>();  // waits for this lane's copies of the step's scales
            __syncwarp();                                 // waits for the copies of all lanes
            ring.wait_empty();
            StepFactors<kDataType>& factors = stages[ring.stage];
            bool has_changed = step == work.begin_step;
#pragma unroll
            for (int group = 0; group < kMostGroups; ++group) {
                if (group >= num_groups) break;
                auto& range = ranges[group];
                const float2 scales = reinterpret_cast<const float2*>(sScales[step % kScaleSteps][group])[lane];
                const float largest = largest_of(scales);
                if (__any_sync(0xffffffff, !range.holds(largest))) {
                    range.make_room(largest_of_warp(largest));
                    has_changed = true;
                }
                factors.store(group, lane, scales.x * range.to_factor(), scales.y * range.to_factor());
                if (lane == 0) factors.divisors[group] = range.divisor;
            }
            if (lane == 0) factors.has_changed = has_changed;
            __syncwarp();  // waits until all lanes have stored their factors
            if (lane == 0) ring.arrive_full();
            ring.advance();
            copy(step + kScaleSteps);
        }
    });
}

}  // namespace fastattn
