// Merges the parts of a tile whose keys several CTAs have shared, in the launch that made them and in the order of
// part_tree.h.
//
// Of 16 nodes side by side, the CTA that is the last to bring one of them merges them into one; it brings that to the 16
// of the next step, until one node is left: the tile's result. A second kernel would cost its launch even where a batch
// fills the GPU and hardly a tile is shared; one CTA alone would have to read 2 MB where one sequence fills an H200 (264
// parts of 16 rows by 512 bytes). In steps of 16, that is two steps of 128 KB at most, each a few loads deep.
#pragma once

#include <cstdint>

#include "decode/split_plan.h"
#include "decode/tile_rows.cuh"
#include "device/arrivals.cuh"

namespace fastattn {

template <int kBlockM>
struct MergeStorage {
    float2 sums[kMergedNodes][kBlockM];  // a row's maximum and sum
    int64_t slot[kMergedNodes];          // of the node that begins here
    uint32_t present;                    // one bit for each of 16 nodes: where one begins
};

// One tile's merge, by the CTA that has just left its last part of that tile. All threads take part in everything.
template <typename Config, DataType kDataType>
struct PartMerger {
    static constexpr int kBlockM = Config::kBlockM;
    using Rows = TileRows<kBlockM, kDataType>;

    const Rows& rows;
    MergeStorage<kBlockM>& shared;
    const TileParts& parts;
    const PartRange own;  // parts that this CTA has made

    // Brings what this CTA has, and goes on for as long as it is the last to do so.
    __device__ __forceinline__ void run() const {
        PartRange nodes = own;  // of this step's level, that this CTA has: side by side always
        int32_t num_nodes = parts.count;
        for (int step = 0;; ++step) {
            const int32_t first = nodes.begin / kMergedNodes, last = (nodes.end - 1) / kMergedNodes;
            const bool has_first = bring(step, first, nodes, num_nodes);
            const bool has_last = first == last ? has_first : bring(step, last, nodes, num_nodes);
            if (num_nodes <= kMergedNodes) return;
            nodes = {has_first ? first : first + 1, has_last ? last + 1 : last};
            if (nodes.begin >= nodes.end) return;
            num_nodes = ceil_div(num_nodes, kMergedNodes);
        }
    }

  private:
    // Of 16 nodes, those that this CTA has. True if it then has the node that holds them all.
    __device__ __forceinline__ bool bring(int step, int32_t parent, PartRange nodes, int32_t num_nodes) const {
        const int32_t first_node = parent * kMergedNodes, end_node = min(first_node + kMergedNodes, num_nodes);
        const int32_t count = end_node - first_node;
        const int32_t brought = min(nodes.end, end_node) - max(nodes.begin, first_node);
        const int shift = step * kLog2MergedNodes;
        const int32_t first_part = first_node << shift, end_part = min(end_node << shift, parts.count);
        if (count == 1 || (own.begin <= first_part && end_part <= own.end)) return true;  // it is one node already
        // Of all tiles and steps, this one alone begins in a CTA's parts and goes on beyond them: its counter is free.
        uint64_t* counter = rows.params.arrivals + int64_t{parts.cta_of(first_part)} * kMergeSteps + step;
        __syncthreads();  // waits until every thread has left what this CTA brings, and is done with `shared`
        const bool is_last =
            threadIdx.x == 0 && (brought == count || arrives_last(counter, rows.params.token, count, brought));
        if (!__syncthreads_or(is_last)) return false;
        find_nodes(first_part, shift, count);
        merge(/*is_result=*/num_nodes <= kMergedNodes);
        return true;
    }

    // For `count` positions side by side: at which of them a node begins (a node may span several), where the node is,
    // and its sums.
    __device__ __forceinline__ void find_nodes(int32_t first_part, int shift, int32_t count) const {
        if (threadIdx.x < kWarpSize) {
            bool begins = false;
            if (threadIdx.x < count) {
                const int32_t part = first_part + (static_cast<int32_t>(threadIdx.x) << shift);
                const int32_t cta = parts.cta_of(part);
                const PartNode node = largest_node(part, parts.of_cta(cta), parts.count);
                begins = node.first_part() == part;
                // Made by several CTAs, it has taken the slot of the first node in it.
                shared.slot[threadIdx.x] = slot_of(rows.params.plan, cta, node);
            }
            const uint32_t present = __ballot_sync(0xffffffff, begins);
            if (threadIdx.x == 0) shared.present = present;
        }
        __syncthreads();  // waits until the slots are known
        for (int i = threadIdx.x; i < kMergedNodes * kBlockM; i += Config::kNumThreads) {
            const int node = i / kBlockM, row = i % kBlockM;
            if ((shared.present >> node & 1) == 0 || row >= rows.num_rows()) continue;
            shared.sums[node][row] = rows.load_sums(shared.slot[node], row);
        }
        __syncthreads();  // waits until all sums are in shared memory: from here on the first node may be overwritten
    }

    __device__ __forceinline__ void merge(bool is_result) const {
        constexpr int kQuads = Config::kHeadDim / 4;
#pragma unroll 1
        for (int item = threadIdx.x; item < rows.num_rows() * kQuads; item += Config::kNumThreads) {
            const int row = item / kQuads, column = item % kQuads * 4;
            RowPart result = merged_nodes(0, row, column);
            if (begins_at(kQuarter)) result = merged(result, merged_nodes(kQuarter, row, column));
            if (begins_at(2 * kQuarter)) {
                RowPart right = merged_nodes(2 * kQuarter, row, column);
                if (begins_at(3 * kQuarter)) right = merged(right, merged_nodes(3 * kQuarter, row, column));
                result = merged(result, right);
            }
            if (is_result) {
                rows.store_result(row, column, result);
            } else {
                rows.store(shared.slot[0], row, column, result);
            }
        }
    }

    __device__ __forceinline__ bool begins_at(int position) const { return (shared.present >> position & 1) != 0; }

    // How many nodes' loads are on their way together: with 8, 84 bytes of registers spill (256 dims, bf16, sm_80).
    static constexpr int kQuarter = kMergedNodes / 4;

    // Nodes [first, first + kQuarter) as one. A node begins at the first.
    __device__ __forceinline__ RowPart merged_nodes(int first, int row, int column) const {
        const uint32_t present = shared.present >> first;
        RowPart nodes[kQuarter];
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) {
            if ((present >> i & 1) == 0) continue;
            const float2 sums = shared.sums[first + i][row];
            nodes[i] = {sums.x, sums.y, rows.load_values(shared.slot[first + i], row, column)};
        }
#pragma unroll
        for (int distance = 1; distance < kQuarter; distance *= 2) {
#pragma unroll
            for (int i = 0; i < kQuarter; i += 2 * distance) {
                if (present >> (i + distance) & 1) nodes[i] = merged(nodes[i], nodes[i + distance]);
            }
        }
        return nodes[0];
    }
};

}  // namespace fastattn
