// Merges the parts of a tile whose keys several CTAs have shared, in the launch that made them and in the order of
// part_tree.h.
//
// Of some nodes side by side (Rows says how many), the CTA that is the last to bring one of them merges them into one;
// it brings that to the nodes of the next step, until one node is left: the tile's result. A second kernel would cost
// its launch even where a batch fills the GPU and hardly a tile is shared; one CTA alone would have to read everything:
// 2 MB where one sequence of flash-decoding fills an H200 (264 parts of 16 rows by 512 bytes), 8 MB of 132 parts in
// attention's tiles.
#pragma once

#include <cstdint>

#include "device/arrivals.cuh"
#include "device/fragment.cuh"
#include "device/part_slots.cuh"
#include "device/part_tree.h"
#include "device/ptx/cp_async.cuh"

namespace fastattn {

// Rows: the rows of a tile, and what becomes of them.
//   kBlockM, kValueDim        how many, and their columns
//   kLog2Nodes                of the nodes that are merged side by side: 4 or 16. More are fewer steps; but each step is work
//                             of one CTA, and of more steps, more CTAs work at a time
//   kQuadsAtOnce              of four columns, whose loads from 4 nodes a thread has on their way together
//   num_rows()                those that exist
//   slots()                   the workspace
//   slots_per_cta()           of it
//   store_result(row, column, part)   takes four columns of the merged row
//
// Threads: those of the CTA that merge. All take part in everything.
//   kCount, index(), sync(), sync_or(predicate)
struct AllThreadsOfCta {
    __device__ __forceinline__ static int index() { return threadIdx.x; }
    __device__ __forceinline__ static void sync() { __syncthreads(); }
    __device__ __forceinline__ static bool sync_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
};

template <typename Rows, typename Threads>
struct MergeStorage {
    static constexpr int kNodes = 1 << Rows::kLog2Nodes;
    static constexpr bool kHoldsValues = kNodes > 4;  // registers have no room for so many on their way together
    float4 values[kHoldsValues ? kNodes : 1][kHoldsValues ? Threads::kCount : 1];  // each thread's own
    float2 sums[kNodes][Rows::kBlockM];                                            // a row's maximum and sum
    int64_t slot[kNodes];                                                          // of the node that begins here
    uint32_t present;  // one bit for each of the nodes: where one begins
};

// One tile's merge, by the CTA that has just left its last part of that tile.
template <typename Rows, typename Threads>
struct PartMerger {
    using Storage = MergeStorage<Rows, Threads>;
    static constexpr int kNodes = 1 << Rows::kLog2Nodes, kBlockM = Rows::kBlockM;
    static_assert(kNodes == 4 || kNodes == 16, "see merged_nodes()");

    const Rows& rows;
    Storage& shared;
    const TileParts& parts;
    const PartRange own;  // parts that this CTA has made

    // Brings what this CTA has, and goes on for as long as it is the last to do so.
    __device__ __forceinline__ void run() const {
        PartRange nodes = own;  // of this step's level, that this CTA has: side by side always
        int32_t num_nodes = parts.count;
        for (int step = 0;; ++step) {
            const int32_t first = nodes.begin / kNodes, last = (nodes.end - 1) / kNodes;
            PartRange complete{last + 1, first};  // of the next level
#pragma unroll 1
            for (int32_t parent = first; parent <= last; parent = parent == last ? last + 1 : last) {
                if (!bring(step, parent, nodes, num_nodes)) continue;
                complete = {min(complete.begin, parent), parent + 1};
            }
            if (num_nodes <= kNodes) return;
            // Between the first and the last parent, this CTA has all nodes.
            nodes = complete;
            if (nodes.begin >= nodes.end) return;
            num_nodes = ceil_div(num_nodes, kNodes);
        }
    }

  private:
    // Of kNodes nodes, those that this CTA has. True if it then has the node that holds them all.
    __device__ __forceinline__ bool bring(int step, int32_t parent, PartRange nodes, int32_t num_nodes) const {
        const int32_t first_node = parent * kNodes, end_node = min(first_node + kNodes, num_nodes);
        const int32_t count = end_node - first_node;
        const int32_t brought = min(nodes.end, end_node) - max(nodes.begin, first_node);
        const int shift = step * Rows::kLog2Nodes;
        const int32_t first_part = first_node << shift, end_part = min(end_node << shift, parts.count);
        if (count == 1 || (own.begin <= first_part && end_part <= own.end)) return true;  // it is one node already
        // Of all tiles and steps, this one alone begins in a CTA's parts and goes on beyond them: its counter is free.
        uint64_t* counter = rows.slots().workspace.arrivals + int64_t{parts.cta_of(first_part)} * kMergeSteps + step;
        const bool counts = Threads::index() == 0 && brought < count;
        if (counts) open_arrivals(counter, rows.slots().workspace.token);  // while stores are on their way
        Threads::sync();  // waits until every thread has left what this CTA brings, and is done with `shared`
        const bool is_last = counts ? arrives_last(counter, count, brought) : brought == count;
        if (!Threads::sync_or(is_last)) return false;
        find_nodes(first_part, shift, count);
        merge(/*is_result=*/num_nodes <= kNodes);
        return true;
    }

    // For `count` positions side by side: at which of them a node begins (a node may span several), where the node is,
    // and its sums.
    __device__ __forceinline__ void find_nodes(int32_t first_part, int shift, int32_t count) const {
        if (Threads::index() < kWarpSize) {
            bool begins = false;
            if (Threads::index() < count) {
                const int32_t part = first_part + (Threads::index() << shift);
                const int32_t cta = parts.cta_of(part);
                const PartNode node = largest_node(part, parts.of_cta(cta), parts.count);
                begins = node.first_part() == part;
                // Made by several CTAs, it has taken the slot of the first node in it.
                shared.slot[Threads::index()] = slot_of(rows.slots_per_cta(), cta, node);
            }
            const uint32_t present = __ballot_sync(0xffffffff, begins);
            if (Threads::index() == 0) shared.present = present;
        }
        Threads::sync();  // waits until the slots are known
        constexpr int kAtOnce = Storage::kHoldsValues ? ceil_div(kNodes * kBlockM, Threads::kCount) : 1;
        for (int first = Threads::index(); first < kNodes * kBlockM; first += kAtOnce * Threads::kCount) {
            float2 sums[kAtOnce];
            const auto for_own_sums = [&](auto&& function) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int item = first + i * Threads::kCount, node = item / kBlockM, row = item % kBlockM;
                    if (begins_at(node) && row < rows.num_rows()) function(node, row, sums[i]);
                }
            };
            for_own_sums([&](int node, int row, float2& own) { own = rows.slots().load_sums(shared.slot[node], row); });
            for_own_sums([&](int node, int row, const float2& own) { shared.sums[node][row] = own; });
        }
        Threads::sync();  // waits until all sums are in shared memory: from here on the first node may be overwritten
    }

    __device__ __forceinline__ void merge(bool is_result) const {
        constexpr int kQuads = Rows::kValueDim / 4, kItems = Rows::kQuadsAtOnce;
        const int num_items = rows.num_rows() * kQuads;
#pragma unroll 1
        for (int first = Threads::index(); first < num_items; first += kItems * Threads::kCount) {
            RowPart results[kItems];
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                const int item = first + i * Threads::kCount;
                if (item < num_items) results[i] = merged_nodes(item / kQuads, item % kQuads * 4);
            }
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                const int item = first + i * Threads::kCount, row = item / kQuads, column = item % kQuads * 4;
                if (item >= num_items) continue;
                if (is_result) {
                    rows.store_result(row, column, results[i]);
                } else {
                    rows.slots().store(shared.slot[0], row, column, results[i]);
                }
            }
        }
    }

    __device__ __forceinline__ bool begins_at(int position) const { return (shared.present >> position & 1) != 0; }

    // All nodes as one.
    __device__ __forceinline__ RowPart merged_nodes(int row, int column) const {
        if constexpr (Storage::kHoldsValues) copy_values(row, column);
        RowPart result = merged_four(0, row, column);
        if constexpr (kNodes == 4) return result;
        if (begins_at(4)) result = merged(result, merged_four(4, row, column));
        if (begins_at(8)) {
            RowPart right = merged_four(8, row, column);
            if (begins_at(12)) right = merged(right, merged_four(12, row, column));
            result = merged(result, right);
        }
        return result;
    }

    // Four columns of all nodes into shared memory, all on their way together. No other thread reads them.
    __device__ __forceinline__ void copy_values(int row, int column) const {
        const bool exists = column < rows.slots().value_dim;
#pragma unroll
        for (int node = 0; node < kNodes; ++node) {
            if (!begins_at(node)) continue;
            const float* values = rows.slots().values_of(shared.slot[node], row) + (exists ? column : 0);
            ptx::cp_async_cg_16(shared_address(&shared.values[node][Threads::index()]), values, exists ? 16 : 0);
        }
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
    }

    __device__ __forceinline__ float4 values_of(int node, int row, int column) const {
        if constexpr (Storage::kHoldsValues) return shared.values[node][Threads::index()];
        return rows.slots().load_values(shared.slot[node], row, column);
    }

    // Nodes [first, first + 4) as one; their loads are on their way together. A node begins at the first.
    __device__ __forceinline__ RowPart merged_four(int first, int row, int column) const {
        const uint32_t present = shared.present >> first;
        RowPart nodes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((present >> i & 1) == 0) continue;
            const float2 sums = shared.sums[first + i][row];
            nodes[i] = {sums.x, sums.y, values_of(first + i, row, column)};
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int i = 0; i < 4; i += 2 * distance) {
                if (present >> (i + distance) & 1) nodes[i] = merged(nodes[i], nodes[i + distance]);
            }
        }
        return nodes[0];
    }
};

}  // namespace fastattn
