// The epilogue of Hopper's int8 matmul kernels: turns a CTA's sums, in registers, into its part of the result.
//
// Results pass through shared memory as 16-bit floats, kPassM rows at a time:
//
//   sums -> scale -> bias -> activation -> residual -> round -> shared memory -> TMA -> result
//
// There are two buffers. While TMA stores one of them, the consumers fill the other, or multiply the next work tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/bulk_tensor.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/swizzle.cuh"
#include "int8_matmul/cluster_sm90.cuh"
#include "int8_matmul/epilogue.cuh"
#include "scheduler/arrivals.cuh"
#include "scheduler/stream_k.h"

namespace fastattn {

// Four sums of a thread.
template <typename Sum>
using FourSums = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;

// A CTA's view of the partials of a tile's sum. Sum: float or int32_t.
template <typename Sum>
struct ClusterPartials {
    SumPartials partials;
    int own;
    float* first;  // this thread's numbers in the first slot

    FASTATTN_DEVICE ClusterPartials(const MatmulEpilogue& epilogue, const MatmulWorkTile& work, int rank, int block_m)
        : partials{0, 1, 0}, own(0), first(nullptr) {
        if (is_whole(epilogue.schedule, work)) return;
        partials = sum_partials(epilogue.schedule, work.tile);
        partials = {warp_uniform(partials.first_cta), warp_uniform(partials.count), warp_uniform(partials.first_slot)};
        own = own_cluster() - partials.first_cta;
        first = epilogue.partial + rank * block_m * kCtaN + threadIdx.x * 4;
    }

    // Returns this thread's numbers in the slot of a partial. Adjacent threads have adjacent numbers, 16 bytes each.
    template <int kBlockM>
    FASTATTN_DEVICE FourSums<Sum>* slot(int partial) const {
        return reinterpret_cast<FourSums<Sum>*>(first + int64_t{partials.slot(partial)} * kBlockM * kClusterN);
    }

    // Returns whether this cluster is the last to arrive among those that split the tile. The other clusters store
    // their partials, in the order of their registers, and then arrive. A cluster that finds all others arrived stores
    // nothing: it is the last.
    template <int kBlockM>
    FASTATTN_DEVICE bool collects(const MatmulEpilogue& epilogue, const Sum (&rY)[kBlockM / 2], int32_t tile, int rank,
                                  int rows_here) const {
        if (partials.count == 1) return true;
        uint64_t* arrivals = epilogue.arrivals + tile * kClusterSize + rank;
        bool is_last = threadIdx.x == 0 && arrives_if_last(arrivals, epilogue.launch_id, partials.count);
        if (ptx::bar_red_or(kBothConsumers, kConsumerThreads, is_last)) return true;
        if (threadIdx.x == 0) open_arrivals(arrivals, epilogue.launch_id);  // while other threads store their sums
        FourSums<Sum>* own_slot = slot<kBlockM>(own);
#pragma unroll
        for (int i = 0; i < kBlockM / kMmaN; ++i) {
            if (i * kMmaN < rows_here) {
                own_slot[i * kConsumerThreads] = {rY[4 * i], rY[4 * i + 1], rY[4 * i + 2], rY[4 * i + 3]};
            }
        }
        ptx::bar_sync(kBothConsumers, kConsumerThreads);  // waits until every thread has stored its sums
        is_last = threadIdx.x == 0 && arrives_last(arrivals, partials.count);
        return ptx::bar_red_or(kBothConsumers, kConsumerThreads, is_last);
    }

    // Replaces rY, this cluster's partial, by the sum of all partials. Adds in a fixed order, so that results repeat
    // bit by bit. The loads of kBatch times 8 rows of M of a partial are in flight together; more would spill.
    template <int kBlockM>
    FASTATTN_DEVICE void add_all(Sum (&rY)[kBlockM / 2], int rows_here) const {
        constexpr int kBatch = 3, kTiles = kBlockM / kMmaN;
        if (partials.count == 1) return;
#pragma unroll
        for (int first_tile = 0; first_tile < kTiles; first_tile += kBatch) {
            constexpr auto for_batch = [](int first_tile, auto&& function) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (first_tile + i < kTiles) function(i, first_tile + i);
                }
            };
            if (first_tile * kMmaN >= rows_here) break;
            FourSums<Sum> sums[kBatch] = {};
#pragma unroll 1
            for (int partial = 0; partial < partials.count; ++partial) {
                FourSums<Sum> more[kBatch];
                for_batch(first_tile, [&](int i, int tile) {
                    more[i] = {rY[4 * tile], rY[4 * tile + 1], rY[4 * tile + 2], rY[4 * tile + 3]};
                    if (partial != own && tile * kMmaN < rows_here) {
                        more[i] = __ldcg(slot<kBlockM>(partial) + tile * kConsumerThreads);
                    }
                });
                for_batch(first_tile, [&](int i, int) {
                    sums[i] = {sums[i].x + more[i].x, sums[i].y + more[i].y, sums[i].z + more[i].z,
                               sums[i].w + more[i].w};
                });
            }
            for_batch(first_tile, [&](int i, int tile) {
                rY[4 * tile] = sums[i].x;
                rY[4 * tile + 1] = sums[i].y;
                rY[4 * tile + 2] = sums[i].z;
                rY[4 * tile + 3] = sums[i].w;
            });
        }
    }
};

// The scales and biases of a thread's two columns of the sums. Loaded before the main loop, which hides the trip. The
// bits of a bias become a number only behind the main loop, because a conversion would wait for the load.
template <DataType kDataType>
struct ColumnTerms {
    float scale[2];
    uint32_t bias_bits[2];

    FASTATTN_DEVICE ColumnTerms(const MatmulEpilogue& epilogue, const CtaTile& tile, const ConsumerPosition& position) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t column = sum_column(epilogue, tile, position, half);
            const bool exists = column < epilogue.sum_columns();
            scale[half] = 1.0f;
            bias_bits[half] = 0x8000;  // -0.0, which changes no sum
            if (epilogue.scale != nullptr && exists) scale[half] = epilogue.scale[column * epilogue.scale_stride];
            if (epilogue.bias != nullptr && exists) bias_bits[half] = epilogue.bias[column];
        }
    }

    FASTATTN_DEVICE float bias(int half) const {
        return unpack<kDataType>(static_cast<uint16_t>(ptx::opaque(bias_bits[half])));
    }
};

// A pass: kPassM rows of a CTA's part of the result, in a buffer in shared memory. The buffer has two boxes of 64
// columns, each in TMA's 128-byte swizzle. With SwiGLU, a CTA has only 64 columns of the result, in the first box.
template <int kPassM>
struct ResultPass {
    using Box = Swizzle<kResultBoxColumns>;
    static constexpr int kBoxBytes = kPassM * Box::kRowBytes;
    static constexpr int kChunks = kCtaN / kChunkElements;  // in a row of the buffer
    static constexpr int kOwnChunks = kPassM * kChunks / kConsumerThreads;

    const MatmulEpilogue& epilogue;
    bool is_gated;
    char* buffer;
    int32_t first_row, num_rows;  // of the result; num_rows of the pass's rows exist
    int32_t first_column;         // of the result

    FASTATTN_DEVICE static int offset(int row, int chunk) {
        return chunk / Box::kChunksPerRow * kBoxBytes + Box::offset(row, chunk % Box::kChunksPerRow);
    }

    // Calls function(i, chunk in the buffer, its row and first column in the result, how many of its columns exist) for
    // the chunks that this thread copies. Of a chunk outside of the result, 0 columns exist, or fewer. Neighbouring
    // threads copy neighbouring chunks.
    template <typename Function>
    FASTATTN_DEVICE void for_own_chunks(Function&& function) const {
        const int chunks = kChunks >> is_gated;
#pragma unroll
        for (int i = 0; i < kOwnChunks; ++i) {
            const int index = ptx::tid_x() + i * kConsumerThreads;
            const int row = (index << is_gated) / kChunks, chunk = index & (chunks - 1);
            if (row >= kPassM) continue;
            const int32_t column = first_column + chunk * kChunkElements;
            const int count = row < num_rows ? min(kChunkElements, epilogue.out.columns - column) : 0;
            function(i, buffer + offset(row, chunk), first_row + row, column, count);
        }
    }

    // Copies the residual into the buffer. All loads are in flight together.
    FASTATTN_DEVICE void load_residual() const {
        const MatrixView<const uint16_t>& residual = epilogue.residual;
        uint4 chunks[kOwnChunks];
        for_own_chunks([&](int i, char*, int32_t row, int32_t column, int count) {
            const uint16_t* elements = residual.data + row * residual.row_stride + column;
            if (count == kChunkElements && reinterpret_cast<uintptr_t>(elements) % kChunkBytes == 0) {
                chunks[i] = *reinterpret_cast<const uint4*>(elements);
            } else {
                FourElements left, right;
                left.load(elements, min(count, kEpilogueColumns));
                right.load(elements + kEpilogueColumns, count - kEpilogueColumns);
                chunks[i] = {left.bits.x, left.bits.y, right.bits.x, right.bits.y};
            }
        });
        for_own_chunks(
            [&](int i, char* sChunk, int32_t, int32_t, int) { *reinterpret_cast<uint4*>(sChunk) = chunks[i]; });
    }

    // Adds the residual, if there is one, to a thread's values, and stores the results in its place. Each pair of
    // values belongs to two adjacent rows of one column of an 8x8 matrix. For each 8 rows of the pass there are two
    // matrices, 8 columns apart, and one with SwiGLU, which leaves the second half of the values unused.
    template <DataType kDataType>
    FASTATTN_DEVICE void store(float (&values)[kPassM / kMmaN][4], const ConsumerPosition& position) const {
        const int matrix = position.lane / kMmaN;  // of the four that an instruction stores
        const int matrix_row = is_gated ? matrix : matrix / 2;
        const int chunk = is_gated ? position.first_of_warp() / (2 * kChunkElements)
                                   : position.first_of_warp() / kChunkElements + matrix % 2;
        const uint32_t first = shared_address(buffer) + offset(matrix_row * kMmaN + position.lane % kMmaN, chunk);
        const int rows_at_once = is_gated ? 4 * kMmaN : 2 * kMmaN;
#pragma unroll
        for (int i = 0; i < kPassM / kMmaN / 2; ++i) {
            if (i * rows_at_once >= kPassM) break;
            const uint32_t address = first + i * rows_at_once * Box::kRowBytes;
            uint32_t four[4];
            if (epilogue.residual.data != nullptr) {
                ptx::ldmatrix_m8n8_x4_trans(four, address);
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    float* two = values[2 * i + m / 2] + m % 2 * 2;
                    two[0] += unpack<kDataType>(static_cast<uint16_t>(four[m]));
                    two[1] += unpack<kDataType>(static_cast<uint16_t>(four[m] >> 16));
                }
            }
            accumulators_to_a<kDataType>(four, values[2 * i], values[2 * i + 1]);
            ptx::stmatrix_x4_trans(address, four);
        }
    }

    // Does the same for a thread with two adjacent columns, without a residual. Its stores have no bank conflicts: the
    // lanes of a quad store to different rows, in which the swizzle puts the same chunk in different banks.
    template <DataType kDataType>
    FASTATTN_DEVICE void store(float (&values)[kPassM / kMmaN][4], const AdjacentPosition& position) const {
        const int chunk = position.output(0) / kChunkElements;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            char* first =
                buffer + offset(accumulator_column(position.lane) + e, chunk) + position.output(0) % kChunkElements * 2;
#pragma unroll
            for (int i = 0; i < kPassM / kMmaN; ++i) {
                *reinterpret_cast<uint32_t*>(first + i * kMmaN * Box::kRowBytes) =
                    pack<kDataType>(values[i][e], values[i][2 + e]);
            }
        }
    }

    // Copies the buffer to the result. Called by all consumer threads, after a barrier. TMA reads the buffer later. It
    // leaves out rows and columns that do not exist.
    FASTATTN_DEVICE void write(const MatrixMap& result_map) const {
        const MatrixView<uint16_t>& out = epilogue.out;
        if (!out.is_aligned()) {
            for_own_chunks([&](int, const char* sChunk, int32_t row, int32_t column, int count) {
                const uint4 chunk = *reinterpret_cast<const uint4*>(sChunk);
                uint16_t* elements = out.data + row * out.row_stride + column;
                FourElements{{chunk.x, chunk.y}}.store(elements, min(count, kEpilogueColumns));
                FourElements{{chunk.z, chunk.w}}.store(elements + kEpilogueColumns, count - kEpilogueColumns);
            });
        } else if (threadIdx.x == 0) {
#pragma unroll
            for (int box = 0; box < 2; ++box) {
                const int32_t column = first_column + box * kResultBoxColumns;
                if (column < out.columns && box < 2 >> is_gated) {
                    ptx::cp_async_bulk_tensor_2d_store(&result_map.encoded, column, first_row,
                                                       shared_address(buffer) + box * kBoxBytes);
                }
            }
            ptx::cp_async_bulk_commit_group();
        }
    }
};

// Turns a thread's gates and ups into silu(gate) * up, which takes the first half of the values. values: for each 8
// rows, two gates and two ups.
template <int kRowBlocks>
FASTATTN_DEVICE void multiply_by_gates(float (&values)[kRowBlocks][4]) {
    float gates[kRowBlocks / 2][4];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) gates[i / 4][i % 4] = values[i / 2][i % 2];
    activate(Activation::kSwiglu, gates);
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) values[i / 4][i % 4] = gates[i / 4][i % 4] * values[i / 2][2 + i % 2];
}

// Calls function(std::integral_constant<int, i>{}) for the one i, from kBegin to kEnd - 1, that equals `index`.
template <int kBegin, int kEnd, typename Function>
FASTATTN_DEVICE void for_index(int index, Function&& function) {
    if constexpr (kEnd - kBegin == 1) {
        function(std::integral_constant<int, kBegin>{});
    } else {
        constexpr int kMiddle = (kBegin + kEnd) / 2;
        if (index < kMiddle) {
            for_index<kBegin, kMiddle>(index, function);
        } else {
            for_index<kMiddle, kEnd>(index, function);
        }
    }
}

// In the last cluster of a tile, writes a CTA's sums to the result. Called by all consumer threads. rY: the thread's
// sums, which the function may overwrite. preactivation(half, row, sum) returns scale * sum + bias for a row of M,
// counted in the tile, and for one of the thread's two columns of N. next_buffer: the index of the buffer to fill next,
// which each pass advances. The caller must wait until TMA has read the buffers (cp_async_bulk_wait_group_read) before
// the CTA exits.
template <DataType kDataType, typename Tile, typename Sum, typename Position, typename Preactivation>
FASTATTN_DEVICE void finish_work_tile(const MatmulEpilogue& epilogue, const MatrixMap& result_map,
                                      ClusterStorage<Tile>& shared, Sum (&rY)[Tile::kBlockM / 2],
                                      const MatmulWorkTile& work, const Position& position, int& next_buffer,
                                      Preactivation&& preactivation) {
    constexpr int kBlockM = Tile::kBlockM, kPassM = Tile::kPassM, kRowBlocks = kPassM / kMmaN;
    const CtaTile tile(epilogue.schedule, work, position.rank);
    const int32_t first_row = warp_uniform(tile.m_tile * kBlockM);
    const int32_t first_column = warp_uniform(tile.n_tile * (kCtaN >> position.is_gated));
    const int rows_here = warp_uniform(min(kBlockM, epilogue.out.rows - first_row));
    const ClusterPartials<Sum> partials(epilogue, work, position.rank, kBlockM);
    if (!partials.template collects<kBlockM>(epilogue, rY, work.tile, position.rank, rows_here)) return;
    partials.template add_all<kBlockM>(rY, rows_here);

#pragma unroll 1  // reading sums needs a copy of the code for each pass, because registers have no index
    for (int pass = 0; pass * kPassM < rows_here; ++pass) {
        const ResultPass<kPassM> result{epilogue,
                                        position.is_gated,
                                        shared.results[next_buffer],
                                        first_row + pass * kPassM,
                                        min(kPassM, rows_here - pass * kPassM),
                                        first_column};
        if (epilogue.residual.data != nullptr) result.load_residual();
        float values[kRowBlocks][4];
        for_index<0, kBlockM / kPassM>(pass, [&](auto constant) {
#pragma unroll
            for (int i = 0; i < kRowBlocks; ++i) {
                const int first = (constant * kRowBlocks + i) * kMmaN;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    values[i][e] =
                        preactivation(e / 2, first + accumulator_column(position.lane) + e % 2, rY[first / 2 + e]);
                }
            }
        });
        if (position.is_gated) {
            multiply_by_gates(values);
        } else {
            activate(epilogue.activation, values);
        }
        // Waits until every thread has stored its part of the residual, which others read.
        if (epilogue.residual.data != nullptr) ptx::bar_sync(kBothConsumers, kConsumerThreads);
        result.template store<kDataType>(values, position);
        ptx::fence_proxy_async_shared();
        // Waits until TMA has read the other buffer, which the next pass fills, and until every thread has stored.
        if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read();
        ptx::bar_sync(kBothConsumers, kConsumerThreads);
        result.write(result_map);
        next_buffer ^= 1;
    }
}

// Encodes the map of the result. Without aligned rows, TMA cannot store it, and the map is not used.
template <typename Tile>
MatrixMap result_map(const MatrixView<uint16_t>& out) {
    if (!out.is_aligned()) return {};
    return matrix_map(out.data, sizeof(uint16_t), out.rows, out.columns, out.row_stride * sizeof(uint16_t),
                      Tile::kPassM, kResultBoxColumns);
}

}  // namespace fastattn
