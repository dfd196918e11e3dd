// Combines the partials of a work tile whose keys several CTAs have split. The partials are combined in the launch that
// made them, and in the order of partial_tree.h.
//
// In each round, 2^kLog2Nodes adjacent nodes have one parent. The CTA that stores the last of these nodes combines all
// of them, and goes on to the next round with the parent, until one node is left: the tile's result. A second kernel
// would cost its launch even if a batch fills the GPU and hardly a tile is split. A single CTA that combined all
// partials would have to read 2 MB if one sequence of flash-decoding fills an H200 (264 partials of 16 rows by 512
// bytes), and 8 MB for 132 partials of attention's tiles.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/cp_async.cuh"
#include "scheduler/arrivals.cuh"
#include "scheduler/partial_tree.h"
#include "scheduler/workspace_slots.cuh"

namespace fastattn {

// Rows, the rows of a tile and where they go, has:
//   kBlockM, kValueDim        the number of rows, and of their columns
//   kLog2Nodes                log2 of how many nodes are combined at once: 4, 16 or 32. With more nodes there are fewer
//                             rounds, each of three trips to L2 (arrival, sums, values). With fewer nodes, more CTAs
//                             work at the same time, because one CTA computes each parent
//   kQuadsAtOnce              only with 4 nodes: how many quads (four columns of a row) a thread loads at once
//   num_rows()                how many rows exist
//   slots()                   the workspace slots
//   slots_per_cta()           how many slots each CTA has
//   store_result(row, column, partial)   stores four columns of the combined row
//
// Threads stands for the threads of the CTA that combine. All of these threads call its functions:
//   kCount, index(), sync(), sync_or(predicate)
struct AllThreadsOfCta {
    FASTATTN_DEVICE static int index() { return threadIdx.x; }
    FASTATTN_DEVICE static void sync() { __syncthreads(); }
    FASTATTN_DEVICE static bool sync_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
};

template <int kLog2Nodes, int kBlockM, int kThreads>
struct CombineStorage {
    static constexpr int kNodes = 1 << kLog2Nodes;
    static constexpr bool kHoldsValues = kNodes > 4;  // more values in flight do not fit in registers
    // The values that each thread has in flight: one quad of each node.
    float4 values[kHoldsValues ? kNodesOfOneTrip : 1][kHoldsValues ? kThreads : 1];
    float2 sums[kNodes][kBlockM];    // the maximum of a row, and its sum of exponentials
    int64_t slot[kNodes];            // of the node that begins at this position
    const float* gFirstRow[kNodes];  // of that node's values in the workspace
    uint32_t present;                // bit i: a node begins at position i
};

// Combines one tile. A CTA calls run() when it has left its last partial of the tile.
template <typename Rows, typename Threads>
struct Combiner {
    using Storage = CombineStorage<Rows::kLog2Nodes, Rows::kBlockM, Threads::kCount>;
    static constexpr int kNodes = Storage::kNodes, kBlockM = Rows::kBlockM;
    static_assert(kNodes == 4 || kNodes == 16 || kNodes == 32, "see combined_nodes()");
    static constexpr bool kCopiesAhead = kNodes > kNodesOfOneTrip;
    static_assert(!Storage::kHoldsValues || Rows::kQuadsAtOnce == 1, "a thread has room for the values of one quad");
    static constexpr int kQuads = Rows::kValueDim / 4;

    const Rows& rows;
    Storage& shared;
    const TilePartials& partials;
    const PartialRange own;  // the partials that this CTA has made

    // Arrives with this CTA's nodes, and goes on to the next round as long as it is the last to arrive.
    FASTATTN_DEVICE void run() const {
        PartialRange nodes = own;  // the nodes of this round that this CTA has; they are always adjacent
        int32_t num_nodes = partials.count;
        for (int round = 0;; ++round) {
            const int32_t first = nodes.begin / kNodes, last = (nodes.end - 1) / kNodes;
            PartialRange complete{first + 1, last};  // its next nodes: so far, the parents between first and last
#pragma unroll 1
            for (int32_t parent = first; parent <= last; parent = parent == last ? last + 1 : last) {
                // Only the first and the last parent may have nodes of other CTAs, so the parents between are skipped.
                if (!arrive_and_combine(round, parent, nodes, num_nodes)) continue;
                complete = {min(complete.begin, parent), max(complete.end, parent + 1)};
            }
            if (num_nodes <= kNodes) return;
            nodes = complete;
            if (nodes.begin >= nodes.end) return;
            num_nodes = ceil_div(num_nodes, kNodes);
        }
    }

  private:
    // Counts this CTA's nodes of a parent as arrived. If they are the last to arrive, combines all nodes of the parent.
    // Returns whether this CTA then has the parent.
    FASTATTN_DEVICE bool arrive_and_combine(int round, int32_t parent, PartialRange nodes, int32_t num_nodes) const {
        const int32_t first_node = parent * kNodes, end_node = min(first_node + kNodes, num_nodes);
        const int32_t count = end_node - first_node;
        const int32_t num_arriving = min(nodes.end, end_node) - max(nodes.begin, first_node);
        const int shift = round * Rows::kLog2Nodes;
        const int32_t first_partial = first_node << shift, end_partial = min(end_node << shift, partials.count);
        if (count == 1 || (own.begin <= first_partial && end_partial <= own.end)) {
            return true;  // the parent is one node already
        }
        // In each round, at most one parent begins in a CTA's partials and ends beyond them, so the CTA and the round
        // identify the parent's counter.
        uint64_t* counter =
            rows.slots().workspace.arrivals + int64_t{partials.cta_of(first_partial)} * kCombineRounds + round;
        const bool counts = Threads::index() == 0 && num_arriving < count;
        if (counts) open_arrivals(counter, rows.slots().workspace.launch_id);  // while stores are in flight
        Threads::sync();  // waits until every thread has stored its part of the nodes, and is done with `shared`
        const bool is_last = counts ? arrives_last(counter, count, num_arriving) : num_arriving == count;
        if (!Threads::sync_or(is_last)) return false;
        find_nodes(first_partial, shift, count);
        combine(/*is_result=*/num_nodes <= kNodes);
        return true;
    }

    // Finds at which of `count` adjacent positions a node begins; a node may cover several positions. Finds the slot of
    // each node, and loads its sums.
    FASTATTN_DEVICE void find_nodes(int32_t first_partial, int shift, int32_t count) const {
        if (Threads::index() < kWarpSize) {
            bool begins = false;
            if (Threads::index() < count) {
                const int32_t partial = first_partial + (Threads::index() << shift);
                const int32_t cta = partials.cta_of(partial);
                const PartialNode node = largest_node(partial, partials.made_by(cta), partials.count);
                begins = node.first_partial() == partial;
                // A node that several CTAs made is in the slot of the first node that was combined into it.
                const int64_t slot = slot_of(rows.slots_per_cta(), cta, node);
                shared.slot[Threads::index()] = slot;
                shared.gFirstRow[Threads::index()] = rows.slots().values_of(slot, 0);
            }
            const uint32_t present = __ballot_sync(0xffffffff, begins);
            if (Threads::index() == 0) shared.present = present;
        }
        Threads::sync();  // waits until the slots are known
        if constexpr (kCopiesAhead) start_to_copy(0, Threads::index());
        constexpr int kAtOnce = Storage::kHoldsValues ? ceil_div(kNodes * kBlockM, Threads::kCount) : 1;
        for (int first = Threads::index(); first < kNodes * kBlockM; first += kAtOnce * Threads::kCount) {
            float2 sums[kAtOnce];
            const auto for_own_sums = [&](auto&& function) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int index = first + i * Threads::kCount, node = index / kBlockM, row = index % kBlockM;
                    if (begins_at(node) && row < rows.num_rows()) function(node, row, sums[i]);
                }
            };
            for_own_sums(
                [&](int node, int row, float2& loaded) { loaded = rows.slots().load_sums(shared.slot[node], row); });
            for_own_sums([&](int node, int row, const float2& loaded) { shared.sums[node][row] = loaded; });
        }
        // Waits until all sums are in shared memory, because combine() may store the result in the first node's slot,
        // where it overwrites this node's sums. Values need no barrier: each thread overwrites only values that it has
        // read itself.
        Threads::sync();
    }

    FASTATTN_DEVICE void combine(bool is_result) const {
        constexpr int kIndices = Rows::kQuadsAtOnce;
        const int num_indices = rows.num_rows() * kQuads;
#pragma unroll 1
        for (int first = Threads::index(); first < num_indices; first += kIndices * Threads::kCount) {
            RowPartial results[kIndices];
#pragma unroll
            for (int i = 0; i < kIndices; ++i) {
                const int index = first + i * Threads::kCount;
                if (index < num_indices) results[i] = combined_nodes(index);
            }
            if constexpr (kCopiesAhead) start_to_copy(0, first + Threads::kCount);
#pragma unroll
            for (int i = 0; i < kIndices; ++i) {
                const int index = first + i * Threads::kCount, row = index / kQuads, column = index % kQuads * 4;
                if (index >= num_indices) continue;
                if (is_result) {
                    rows.store_result(row, column, results[i]);
                } else {
                    rows.slots().store(shared.slot[0], row, column, results[i]);
                }
            }
        }
    }

    FASTATTN_DEVICE bool begins_at(int position) const { return (shared.present >> position & 1) != 0; }

    // Combines all nodes in one quad, the index-th. With kCopiesAhead, the values of the first kNodesOfOneTrip nodes
    // are already in flight.
    FASTATTN_DEVICE RowPartial combined_nodes(int index) const {
        const int row = index / kQuads, column = index % kQuads * 4;
        if constexpr (kNodes == 4) {
            return combined_four(0, row, column);
        } else {
            static_assert(kNodesOfOneTrip == 16, "a trip brings eight nodes twice");
            RowPartial before, trip;  // of the earlier trips' nodes, and of this trip's
#pragma unroll 1
            for (int first = 0; first < kNodes; first += 8) {
                if (!begins_at(first)) continue;
                if (first % kNodesOfOneTrip == 0) {
                    if (first > 0 || !kCopiesAhead) start_to_copy(first, index);
                    ptx::cp_async_wait_group<0>();
                    if (first > 0) before = trip;
                }
                RowPartial eight = combined_four(first, row, column);
                if (begins_at(first + 4)) eight = combined(eight, combined_four(first + 4, row, column));
                trip = first % kNodesOfOneTrip == 0 ? eight : combined(trip, eight);
            }
            return kCopiesAhead && begins_at(kNodesOfOneTrip) ? combined(before, trip) : trip;
        }
    }

    // Starts to copy the index-th quad of nodes [first, first + kNodesOfOneTrip) to this thread's part of
    // shared.values, which no other thread reads. Copies nothing if the quad is past the last row.
    FASTATTN_DEVICE void start_to_copy(int first, int index) const {
        const int row = index / kQuads, column = index % kQuads * 4;
        if (row >= rows.num_rows()) return;
        const int32_t value_dim = rows.slots().value_dim;
        const uint32_t present = shared.present >> first;
        constexpr int kUnrolled = kCopiesAhead ? 4 : kNodesOfOneTrip;  // with copies ahead, it is inlined three times
#pragma unroll kUnrolled
        for (int node = 0; node < kNodesOfOneTrip; ++node) {
            if ((present >> node & 1) == 0) continue;
            ptx::cp_async_cg_16(shared_address(&shared.values[node][Threads::index()]),
                                shared.gFirstRow[first + node] + (row * value_dim + column),
                                column < value_dim ? 16 : 0);
        }
        ptx::cp_async_commit_group();
    }

    FASTATTN_DEVICE float4 values_of(int node, int row, int column) const {
        if constexpr (Storage::kHoldsValues) return shared.values[node % kNodesOfOneTrip][Threads::index()];
        return rows.slots().load_values(shared.slot[node], row, column);
    }

    // Combines nodes [first, first + 4), whose loads are in flight together. A node must begin at `first`.
    FASTATTN_DEVICE RowPartial combined_four(int first, int row, int column) const {
        const uint32_t present = shared.present >> first;
        RowPartial nodes[4];
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
                if (present >> (i + distance) & 1) nodes[i] = combined(nodes[i], nodes[i + distance]);
            }
        }
        return nodes[0];
    }
};

}  // namespace fastattn
