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
// Scales per tensor or channel multiply the finished sums. Scales per group along K multiply the weights, which are
// then rounded to 16 bits (group_factors_sm90.cuh): two more HFMA2 for each pair.
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
#include "int8_matmul/group_factors_sm90.cuh"

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

// One consumer's side of the ring.
template <DataType kDataType, typename Tile>
struct WeightConsumer : DecodingConsumer<kDataType, Tile> {
    using Base = DecodingConsumer<kDataType, Tile>;
    using Base::ahead, Base::shared;

    uint32_t offset;
    int to_lower;  // the distance of a lane's two rows of weights, in bytes

    FASTATTN_DEVICE WeightConsumer(ClusterStorage<Tile>& shared, const ConsumerPosition& position)
        : Base(shared, position.lane),
          offset(WeightTileSm90::offset(position.output(0), position.lane)),
          to_lower(position.half_distance() * WeightTileSm90::kRowBytes) {}

    // Waits until the next step's operands have landed, and decodes the lane's weights. scaled(row, k, pair) returns
    // what a pair of decoded weights becomes. row: 0 or 1, for the upper or the lower row; k: the pair's 16 of K.
    template <typename Scaled>
    FASTATTN_DEVICE void decode(StepWeights<Tile>& rW, Scaled&& scaled) const {
        ahead.wait_full();
        const char* sW = shared.weights(ahead.stage);
#pragma unroll
        for (int k = 0; k < Tile::kBlockK / kMmaK; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i % 2, next_eight = i / 2 * 8;
                const char* two = sW + (offset ^ k * kChunkBytes) + (row == 0 ? 0 : to_lower) + next_eight;
                const uint32_t biased_two = biased(*reinterpret_cast<const uint16_t*>(two));
                rW[k][i] = scaled(row, k, decode_pair<kDataType, 0, 1>(biased_two));
            }
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
        const CtaTile tile(schedule, work, rank);
        const ColumnTerms<kDataType> terms(epilogue, tile, position);
        float rY[kBlockM / 2];  // [64 of N, kBlockM] of the warpgroup
#pragma unroll
        for (float& sum : rY) sum = 0.0f;
        ptx::written_by_wgmma(rY);
        const int32_t num_steps = warp_uniform(work.end_step - work.begin_step);
        if constexpr (kIsGrouped) {
            const int32_t rows[2] = {sum_column(epilogue, tile, position, 0), sum_column(epilogue, tile, position, 1)};
            GroupFactors<kDataType, Tile> scales(params.matmul.weight, rows, work, lane);
            consumer.sum(rY, num_steps, [&](StepWeights<Tile>& rW) {
                scales.advance();
                consumer.decode(rW, [&](int row, int k, uint32_t pair) {
                    return scales.factors[k * kMmaK / Int8WeightView::kSmallestGroup][row].times(pair);
                });
            });
            // Other splits of the tile have other divisors, so sums leave these units before they are added.
#pragma unroll
            for (int i = 0; i < kBlockM / 2; ++i) rY[i] *= scales.ranges[i / 2 % 2].divisor;
        } else {
            consumer.sum(rY, num_steps, [&](StepWeights<Tile>& rW) {
                consumer.decode(rW, [](int, int, uint32_t pair) { return pair; });
            });
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
