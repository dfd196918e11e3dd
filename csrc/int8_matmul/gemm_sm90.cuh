// Matmul with int8 weights for Hopper: Y[M, N] = act(X[M, K] · Wᵀ + bias) + residual, W = scale * int8[N, K],
// row-major.
//
// The tile is computed transposed, W · Xᵀ, as on sm_80: weights are operand A of wgmma, from registers, and tokens
// operand B, from shared memory. Clusters of two CTAs are persistent: a cluster computes one work tile after another,
// each of them a tile of 256 columns and kBlockM rows of Y, or a split of such a tile (stream_k.h). In a CTA, one
// thread produces and two warpgroups consume. A consumer has 64 columns and all rows:
//
//   ring, stages      full: its bytes have landed     empty: the consumers of both CTAs have read it
//   W, X  kNumStages  before W becomes 16-bit floats  after the products
//
// A step takes kBlockK of K. A consumer converts its weights of the next step to 16-bit floats while the tensor cores
// multiply those of this step. While a consumer waits for its own products, the tensor cores compute those of the other
// consumer. One consumer:
//
//   tensor cores   W0·X0ᵀ          | W1·X1ᵀ          | W2·X2ᵀ          |
//   other pipes    | decode W1     | decode W2       | decode W3       |
//
// A lane's part of wgmma's operand A has elements 2t and 2t + 1 of every 8 of K (t: the lane's index among the four of
// a row). In row-major weights these are 2 adjacent bytes, which one 16-bit load fetches. Converting such a pair takes
// LDS, LOP3, PRMT and HFMA2. If the weights were stored permuted and with a bias of 128, only PRMT and HFMA2 would
// remain. That would save little, because a pair is converted once for all tokens of a tile, and every reader of
// weights would have to know a second layout.
//
// Scales per tensor or channel multiply the finished sums. Scales per group along K multiply the sums of 32 or 64 k,
// which are a second set of accumulators.
//
// Preconditions: those of Int8WeightView and MatrixView. N and K may have any value, because TMA reads zeros outside of
// a matrix.
#pragma once

#include <cstdint>

#include "device/dequantize.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/shared_memory.h"
#include "host/device_facts.h"
#include "host/launch.h"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/epilogue_sm90.cuh"

namespace fastattn {

// [rows, 64] int8 as TMA writes it with the 64-byte swizzle: chunk c of row r is stored as chunk c ^ (r / 2 % 4). A
// warp reads 2 bytes a lane, 8 bytes of each of 8 rows, which are in different banks.
struct WeightTileSm90 {
    static constexpr int kRowBytes = 64;
    static constexpr int kBoxRows = 64;
    static constexpr int kBoxBytes = kBoxRows * kRowBytes;

    // Returns the offset of elements 2t and 2t + 1 of the first 16 of K. The swizzle is an exclusive or, so the offset
    // for the k-th 16 is offset ^ k * kChunkBytes.
    FASTATTN_DEVICE static uint32_t offset(int row, int lane) {
        return row * kRowBytes + row / 2 % 4 * kChunkBytes + accumulator_column(lane);
    }
};

// Decodes a lane's weights of a step. sW: the step's weights. offset: WeightTileSm90::offset() for the lane's upper
// row. to_lower: the distance of the lane's lower row, in bytes.
template <DataType kDataType, typename Tile>
FASTATTN_DEVICE void decode_weights(StepWeights<Tile>& rW, const char* sW, uint32_t offset, int to_lower) {
#pragma unroll
    for (int k = 0; k < Tile::kBlockK / kMmaK; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int lower_row = i % 2 == 0 ? 0 : to_lower, next_eight = i / 2 * 8;
            const char* two = sW + (offset ^ k * kChunkBytes) + lower_row + next_eight;
            rW[k][i] = decode_pair<kDataType, 0, 1>(biased(*reinterpret_cast<const uint16_t*>(two)));
        }
    }
}

// One consumer's side of the ring.
template <DataType kDataType, typename Tile>
struct WeightConsumer : DecodingConsumer<kDataType, Tile> {
    using Base = DecodingConsumer<kDataType, Tile>;
    using Base::ahead, Base::ring, Base::shared;

    uint32_t offset;
    int to_lower;

    FASTATTN_DEVICE WeightConsumer(ClusterStorage<Tile>& shared, const ConsumerPosition& position)
        : Base(shared, position.lane),
          offset(WeightTileSm90::offset(position.output(0), position.lane)),
          to_lower(position.half_distance() * WeightTileSm90::kRowBytes) {}

    // Waits until the next step's operands have landed, and decodes its weights.
    FASTATTN_DEVICE void decode(StepWeights<Tile>& rW) const {
        ahead.wait_full();
        decode_weights<kDataType, Tile>(rW, shared.weights(ahead.stage), offset, to_lower);
    }

    // Adds the products of all steps to rY.
    FASTATTN_DEVICE void sum(float (&rY)[Tile::kBlockM / 2], int32_t num_steps) {
        Base::sum(rY, num_steps, [this](StepWeights<Tile>& rW) { decode(rW); });
    }

    // Does the same with a scale for each group of K: multiplies the products over kGroupK (32 or 64) by their group's
    // scale before it adds them. scale(half, first_k) returns the scale for one of the thread's two columns of N;
    // first_k counts from the work tile's first step. The scales of a step are loaded one step before.
    template <int kGroupK, typename Scale>
    FASTATTN_DEVICE void sum_groups(float (&rY)[Tile::kBlockM / 2], int32_t num_steps, Scale&& scale) {
        constexpr int kGroups = Tile::kBlockK / kGroupK;
        struct Operands {
            StepWeights<Tile> rW;
            float scales[kGroups][2];
        } operands[2];
        int32_t next_k = 0;
        const auto load = [&](Operands& next) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                next.scales[group][0] = scale(0, next_k + group * kGroupK);
                next.scales[group][1] = scale(1, next_k + group * kGroupK);
            }
            next_k += Tile::kBlockK;
            decode(next.rW);
            ahead.advance();
        };
        const auto step = [&](const Operands& current, auto&& load_next) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                float rGroup[Tile::kBlockM / 2];
                start_products<kDataType, kGroupK, false, Tile>(rGroup, current.rW, this->input(ring.stage),
                                                                group * kGroupK);
                if (group == 0) load_next();
                wait_gemm<0>(rGroup);  // leaves none in flight
                if (group == kGroups - 1) this->release();
#pragma unroll
                for (int i = 0; i < Tile::kBlockM / 2; ++i) rY[i] += rGroup[i] * current.scales[group][i / 2 % 2];
            }
        };

        if (num_steps == 0) return;
        load(operands[0]);
        int32_t left = num_steps;
        for (; left > 2; left -= 2) {
            step(operands[0], [&] { load(operands[1]); });
            step(operands[1], [&] { load(operands[0]); });
        }
        if (left == 2) {
            step(operands[0], [&] { load(operands[1]); });
            step(operands[1], [] {});
        } else {
            step(operands[0], [] {});
        }
    }
};

template <int kBlockM, DataType kDataType, bool kIsGrouped>
__global__ void __launch_bounds__(Int8MatmulTileSm90<kBlockM>::kNumThreads, 1)
    int8_matmul_sm90(const __grid_constant__ ClusterParams params) {
    using Tile = Int8MatmulTileSm90<kBlockM>;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<ClusterStorage<Tile>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const MatmulEpilogue& epilogue = params.matmul.epilogue;
    const MatmulSchedule& schedule = epilogue.schedule;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int rank = ptx::cluster_ctarank();
    start_cluster(shared);

    // Producer.
    if (warpgroup == Tile::kNumConsumers) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0 && lane == 0) {
            produce_for_cluster(
                shared, params, rank, Tile::kBlockK,
                [&](const CtaTile& tile, int32_t step, uint32_t destination, uint32_t landed) {
                    const int32_t first_n = tile.n_tile * epilogue.result_columns(kCtaN);
                    const int32_t to_second =
                        epilogue.is_gated() ? epilogue.out.columns : WeightTileSm90::kBoxRows;  // the ups
                    const int32_t first_k = step * Tile::kBlockK;
                    ptx::cp_async_bulk_tensor_2d(destination, &params.weight.encoded, first_k, first_n, landed);
                    ptx::cp_async_bulk_tensor_2d(destination + WeightTileSm90::kBoxBytes, &params.weight.encoded,
                                                 first_k, first_n + to_second, landed);
                });
        }
        leave_cluster();
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    const ConsumerPosition position{warpgroup, warp, lane, rank, epilogue.is_gated()};
    WeightConsumer<kDataType, Tile> consumer(shared, position);
    int next_buffer = 0;
    // Forces inlining, however long the lambda is: ptxas would serialise wgmma in a separate function.
    for_cluster_tiles(schedule, [&](const MatmulWorkTile& work) __attribute__((always_inline)) {
        const ColumnTerms<kDataType> terms(epilogue, CtaTile(schedule, work, rank), position);
        float rY[kBlockM / 2];  // [64 of N, kBlockM] of the warpgroup
#pragma unroll
        for (float& sum : rY) sum = 0.0f;
        ptx::written_by_wgmma(rY);
        const int32_t num_steps = warp_uniform(work.end_step - work.begin_step);
        if constexpr (kIsGrouped) {
            const Int8WeightView& weight = params.matmul.weight;
            const CtaTile tile(schedule, work, rank);
            const float* gScale[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t row = sum_column(epilogue, tile, position, half);
                gScale[half] = weight.scale + int64_t{min(row, weight.rows - 1)} * weight.groups;
            }
            const int32_t begin_k = work.begin_step * Tile::kBlockK;
            const auto scale = [&](int half, int32_t k) {
                const int32_t group = (begin_k + k) / Int8WeightView::kSmallestGroup >> weight.group_shift;
                return group < weight.groups ? __ldg(gScale[half] + group) : 0.0f;  // past the last one, W is zero
            };
            if (weight.group_shift == 0) {
                consumer.template sum_groups<Int8WeightView::kSmallestGroup>(rY, num_steps, scale);
            } else {
                consumer.template sum_groups<Tile::kBlockK>(rY, num_steps, scale);
            }
        } else {
            consumer.sum(rY, num_steps);
        }

        // Epilogue.
        const float bias[2] = {terms.bias(0), terms.bias(1)};
        finish_work_tile<kDataType>(epilogue, params.result, shared, rY, work, position, next_buffer,
                                    [&](int half, int, float sum) {
                                        return sum * Int8Decoding<kDataType>::kFactor * terms.scale[half] + bias[half];
                                    });
    });
    ptx::cp_async_bulk_wait_group_read();  // the buffers must exist until TMA has read them
    leave_cluster();
}

template <int kBlockM, DataType kDataType, bool kIsGrouped>
void launch_int8_matmul_sm90(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    using Tile = Int8MatmulTileSm90<kBlockM>;
    const Int8WeightView& weight = params.weight;
    const ClusterParams all_params{params,
                                   matrix_map(weight.data, 1, weight.rows, weight.columns, weight.row_stride,
                                              WeightTileSm90::kBoxRows, Tile::kBlockK),
                                   matrix_map(params.input.data, 2, params.input.rows, params.input.columns,
                                              params.input.row_stride * 2, kBlockM / kClusterSize, Tile::kBlockK),
                                   result_map<Tile>(params.epilogue.out)};
    launch_clusters<Tile>(kernel, int8_matmul_sm90<kBlockM, kDataType, kIsGrouped>, all_params, device_facts().num_sms,
                          stream);
}

}  // namespace fastattn
