// The split plan as Python calls it: what every CTA of a plan takes, and how its parts are merged, from the functions
// that the kernels compile.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "decode/split_plan.h"

namespace {

using namespace fastattn;

constexpr int32_t kBlockKeys = 64;

struct Call {
    const int32_t* lengths;
    int32_t batch;
    SequenceShape shape;
    SplitPlan plan;
    int64_t total = 0, share = 0;

    Call(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads, int32_t row_tiles,
         int64_t num_splits, int32_t batch_invariant, int32_t resident_ctas)
        : lengths(lengths),
          batch(batch),
          shape{shape[0], shape[1], shape[2], shape[3]},
          plan(split_plan(this->shape, batch, kv_heads, row_tiles, kBlockKeys, num_splits, batch_invariant != 0,
                          resident_ctas)) {
        for (int32_t i = 0; i < batch; ++i) total += int64_t{plan.tiles_per_sequence} * spans(i).num_spans;
        share = plan.num_ctas > 0 ? spans_per_cta(plan, total) : 0;
    }

    CachedSequence tokens(int32_t sequence) const { return cached_sequence(shape, lengths[sequence]); }
    TileSpans spans(int32_t sequence) const { return tile_spans(plan, tokens(sequence), kBlockKeys); }

    // Calls function(sequence, share, parts) for what a CTA takes, in its order.
    template <typename Function>
    void for_each_share(int32_t cta, Function&& function) const {
        const int64_t end = std::min((cta + 1) * share, total);
        int32_t sequence = 0;
        int64_t first_span = 0;
        for (int64_t span = cta * share; span < end;) {
            while (span >= first_span + int64_t{plan.tiles_per_sequence} * spans(sequence).num_spans) {
                first_span += int64_t{plan.tiles_per_sequence} * spans(sequence++).num_spans;
            }
            const TileSpans tile = spans(sequence);
            const TileShare taken = tile_share(plan, tile, tokens(sequence), kBlockKeys, first_span, span, end);
            function(sequence, taken, tile_parts(plan, tile, first_span, taken.tile_idx, share));
            span += taken.count;
        }
    }
};

// A node as it lies in memory: which tile's, which parts it holds, and a hash of the order in which they were merged.
struct Merged {
    int64_t tile;
    int32_t begin, end;
    uint64_t hash;
};

uint64_t hash_of(uint64_t left, uint64_t right) {
    return (left * 0x9e3779b97f4a7c15 ^ right) * 0xbf58476d1ce4e5b9 + 1;
}

// The work of all CTAs, each from its beginning to its end, in some order. As decode/split_sm80.cuh and
// device/merge_parts.cuh do it, with hashes in the place of numbers.
struct Simulation {
    const Call& call;
    std::map<int64_t, Merged> slots;
    std::map<std::pair<int64_t, int32_t>, int32_t> arrived;
    std::map<int64_t, uint64_t> results;
    bool is_right = true;

    Merged at(int64_t slot, int64_t tile, int32_t begin) {
        const auto found = slots.find(slot);
        if (found != slots.end() && found->second.tile == tile && found->second.begin == begin) return found->second;
        is_right = false;
        return {tile, begin, begin, 0};
    }

    void merge(Merged& left, const Merged& right) {
        is_right &= left.tile == right.tile && left.end == right.begin;
        left = {left.tile, left.begin, right.end, hash_of(left.hash, right.hash)};
    }

    void store(bool is_result, int64_t slot, const TileParts& parts, const Merged& merged) {
        is_right &= slot < num_slots(call.plan);
        if (!is_result) {
            slots[slot] = merged;
        } else {
            is_right &= merged.begin == 0 && merged.end == parts.count && results.count(merged.tile) == 0;
            results[merged.tile] = merged.hash;
        }
    }

    bool bring(int64_t tile, const TileParts& parts, PartRange own, int step, int32_t parent, PartRange nodes,
               int32_t num_nodes) {
        const int32_t first_node = parent * kMergedNodes, end_node = std::min(first_node + kMergedNodes, num_nodes);
        const int shift = step * kLog2MergedNodes;
        const int32_t first_part = first_node << shift, end_part = std::min(end_node << shift, parts.count);
        if (end_node - first_node == 1 || (own.begin <= first_part && end_part <= own.end)) return true;
        const int32_t brought = std::min(nodes.end, end_node) - std::max(nodes.begin, first_node);
        int32_t& counter = arrived[{parts.cta_of(first_part), step}];
        is_right &= step < kMergeSteps;
        if (brought < end_node - first_node && (counter += brought) < end_node - first_node) return false;
        counter = 0;
        std::array<std::optional<Merged>, kMergedNodes> found;
        for (int32_t i = 0; i < end_node - first_node; ++i) {
            const int32_t part = first_part + (i << shift), cta = parts.cta_of(part);
            const PartNode node = largest_node(part, parts.of_cta(cta), parts.count);
            if (node.first_part() == part) found[i] = at(slot_of(call.plan.slots_per_cta, cta, node), tile, part);
        }
        for (int32_t distance = 1; distance < kMergedNodes; distance *= 2) {
            for (int32_t i = 0; i < kMergedNodes; i += 2 * distance) {
                if (found[i + distance]) merge(*found[i], *found[i + distance]);
            }
        }
        const int32_t first_cta = parts.cta_of(first_part);
        const PartNode first = largest_node(first_part, parts.of_cta(first_cta), parts.count);
        store(num_nodes <= kMergedNodes, slot_of(call.plan.slots_per_cta, first_cta, first), parts, *found[0]);
        return true;
    }

    void run(int32_t cta) {
        call.for_each_share(cta, [&](int32_t sequence, const TileShare& share, const TileParts& parts) {
            const int64_t tile = int64_t{sequence} * call.plan.tiles_per_sequence + share.tile_idx;
            const PartRange own = parts.of_cta(cta);
            const int32_t part = call.plan.spans_are_parts ? share.first : own.begin;
            const PartNode made = largest_node(part, {own.begin, part + 1}, parts.count);
            Merged merged{tile, part, part + 1, static_cast<uint64_t>(part) + 17};
            for (int32_t level = 0; level < made.level; ++level) {
                const int32_t index = part >> level;
                if (index % 2 == 0) continue;
                Merged left = at(slot_of(call.plan.slots_per_cta, cta, {level, index - 1}), tile, (index - 1) << level);
                merge(left, merged);
                merged = left;
            }
            store(made.holds_all(parts.count), slot_of(call.plan.slots_per_cta, cta, made), parts, merged);
            if (own.end - own.begin == parts.count || part + 1 < own.end) return;
            PartRange nodes = own;
            int32_t num_nodes = parts.count;
            for (int step = 0;; ++step) {
                const int32_t first = nodes.begin / kMergedNodes, last = (nodes.end - 1) / kMergedNodes;
                const bool has_first = bring(tile, parts, own, step, first, nodes, num_nodes);
                const bool has_last = first == last ? has_first : bring(tile, parts, own, step, last, nodes, num_nodes);
                if (num_nodes <= kMergedNodes) return;
                nodes = {has_first ? first : first + 1, has_last ? last + 1 : last};
                if (nodes.begin >= nodes.end) return;
                num_nodes = ceil_div(num_nodes, kMergedNodes);
            }
        });
    }
};

}  // namespace

// One row of 9 numbers for each share of a tile that a CTA takes: CTA, sequence, tile, first key, end key, spans, which of
// the tile's parts it goes into, of how many, and how many of these are the CTA's. Returns how many rows; facts[0 … 3] are
// the CTAs, the slots, the counters and the largest share.
extern "C" int64_t decode_plan(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads,
                               int32_t row_tiles, int64_t num_splits, int32_t batch_invariant, int32_t resident_ctas,
                               int64_t* facts, int64_t* rows) {
    const Call call(lengths, batch, shape, kv_heads, row_tiles, num_splits, batch_invariant, resident_ctas);
    facts[0] = call.plan.num_ctas, facts[1] = num_slots(call.plan), facts[2] = num_counters(call.plan);
    facts[3] = call.share;
    int64_t num_rows = 0;
    for (int32_t cta = 0; cta < call.plan.num_ctas; ++cta) {
        call.for_each_share(cta, [&](int32_t sequence, const TileShare& share, const TileParts& parts) {
            const PartRange own = parts.of_cta(cta);
            int64_t* row = rows + 9 * num_rows++;
            row[0] = cta, row[1] = sequence, row[2] = share.tile_idx, row[3] = share.begin_key, row[4] = share.end_key;
            row[5] = share.count, row[6] = call.plan.spans_are_parts ? share.first : own.begin;
            row[7] = parts.count, row[8] = own.end - own.begin;
        });
    }
    return num_rows;
}

// results[tile] is a hash of the order in which the tile's parts are merged, where CTAs run one after the other in the
// order that the seed gives. False where one of them finds in a slot what does not belong there, or a tile gets no result.
extern "C" bool decode_merges(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads,
                              int32_t row_tiles, int64_t num_splits, int32_t batch_invariant, int32_t resident_ctas,
                              int32_t seed, uint64_t* results) {
    const Call call(lengths, batch, shape, kv_heads, row_tiles, num_splits, batch_invariant, resident_ctas);
    Simulation simulation{call, {}, {}, {}};
    std::vector<int32_t> order(static_cast<size_t>(call.plan.num_ctas));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<uint32_t>(seed)));
    for (const int32_t cta : order) simulation.run(cta);
    const int64_t tiles = int64_t{batch} * call.plan.tiles_per_sequence;
    for (int64_t tile = 0; tile < tiles; ++tile) results[tile] = simulation.results[tile];
    const bool all_zero = std::all_of(simulation.arrived.begin(), simulation.arrived.end(),
                                      [](const auto& counter) { return counter.second == 0; });
    return simulation.is_right && all_zero && static_cast<int64_t>(simulation.results.size()) == tiles;
}
