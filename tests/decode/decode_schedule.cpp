// Lets Python call the functions that flash-decoding's kernels compile: which splits every CTA takes, and how their
// partials are combined.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "scheduler/decode_splits.h"

namespace {

using namespace fastattn;

constexpr int32_t kBlockKeys = 64;
constexpr int kLog2CombinedNodes = log2_combined_nodes(/*head_dim=*/128), kCombinedNodes = 1 << kLog2CombinedNodes;

struct Call {
    const int32_t* lengths;
    int32_t batch;
    SequenceShape shape;
    SplitSchedule schedule;
    int64_t total = 0, run = 0;

    Call(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads, int32_t row_tiles,
         int64_t num_splits, int32_t batch_invariant, int32_t resident_ctas)
        : lengths(lengths),
          batch(batch),
          shape{shape[0], shape[1], shape[2], shape[3]},
          schedule(split_schedule(this->shape, batch, kv_heads, row_tiles, kBlockKeys, num_splits, batch_invariant != 0,
                                  resident_ctas)) {
        for (int32_t i = 0; i < batch; ++i) total += int64_t{schedule.tiles_per_sequence} * splits(i).num_splits;
        run = schedule.num_ctas > 0 ? choose_splits_per_cta(schedule, total) : 0;
    }

    CachedSequence tokens(int32_t sequence) const { return cached_sequence(shape, lengths[sequence]); }
    TileSplits splits(int32_t sequence) const { return tile_splits(schedule, tokens(sequence), kBlockKeys); }

    // Calls function(sequence, run, partials) for each run of splits that a CTA takes, in its order.
    template <typename Function>
    void for_each_run(int32_t cta, Function&& function) const {
        const int64_t end = std::min((cta + 1) * run, total);
        int32_t sequence = 0;
        int64_t first_split = 0;
        for (int64_t split = cta * run; split < end;) {
            while (split >= first_split + int64_t{schedule.tiles_per_sequence} * splits(sequence).num_splits) {
                first_split += int64_t{schedule.tiles_per_sequence} * splits(sequence++).num_splits;
            }
            const TileSplits tile = splits(sequence);
            const SplitRun taken = split_run(schedule, tile, tokens(sequence), kBlockKeys, first_split, split, end);
            function(sequence, taken, tile_partials(schedule, tile, first_split, taken.tile_idx, run));
            split += taken.count;
        }
    }
};

// A node in memory: its tile, the range of its partials, and a hash of the order in which they were combined.
struct Combined {
    int64_t tile;
    int32_t begin, end;
    uint64_t hash;
};

uint64_t hash_of(uint64_t left, uint64_t right) {
    return (left * 0x9e3779b97f4a7c15 ^ right) * 0xbf58476d1ce4e5b9 + 1;
}

// Simulates all CTAs, one after the other, in some order: like decode/split_sm80.cuh and scheduler/combine.cuh, with
// hashes instead of numbers.
struct Simulation {
    const Call& call;
    std::map<int64_t, Combined> slots;
    std::map<std::pair<int64_t, int32_t>, int32_t> arrived;
    std::map<int64_t, uint64_t> results;
    bool is_right = true;

    Combined at(int64_t slot, int64_t tile, int32_t begin) {
        const auto found = slots.find(slot);
        if (found != slots.end() && found->second.tile == tile && found->second.begin == begin) return found->second;
        is_right = false;
        return {tile, begin, begin, 0};
    }

    void combine(Combined& left, const Combined& right) {
        is_right &= left.tile == right.tile && left.end == right.begin;
        left = {left.tile, left.begin, right.end, hash_of(left.hash, right.hash)};
    }

    void store(bool is_result, int64_t slot, const TilePartials& partials, const Combined& combined) {
        is_right &= slot < num_workspace_slots(call.schedule);
        if (!is_result) {
            slots[slot] = combined;
        } else {
            is_right &= combined.begin == 0 && combined.end == partials.count && results.count(combined.tile) == 0;
            results[combined.tile] = combined.hash;
        }
    }

    bool bring(int64_t tile, const TilePartials& partials, PartialRange own, int step, int32_t parent,
               PartialRange nodes, int32_t num_nodes) {
        const int32_t first_node = parent * kCombinedNodes, end_node = std::min(first_node + kCombinedNodes, num_nodes);
        const int shift = step * kLog2CombinedNodes;
        const int32_t first_partial = first_node << shift, end_partial = std::min(end_node << shift, partials.count);
        if (end_node - first_node == 1 || (own.begin <= first_partial && end_partial <= own.end)) return true;
        const int32_t brought = std::min(nodes.end, end_node) - std::max(nodes.begin, first_node);
        int32_t& counter = arrived[{partials.cta_of(first_partial), step}];
        is_right &= step < kCombineRounds;
        if (brought < end_node - first_node && (counter += brought) < end_node - first_node) return false;
        counter = 0;
        std::array<std::optional<Combined>, kCombinedNodes> found;
        for (int32_t i = 0; i < end_node - first_node; ++i) {
            const int32_t partial = first_partial + (i << shift), cta = partials.cta_of(partial);
            const PartialNode node = largest_node(partial, partials.made_by(cta), partials.count);
            if (node.first_partial() == partial)
                found[i] = at(slot_of(call.schedule.slots_per_cta, cta, node), tile, partial);
        }
        for (int32_t distance = 1; distance < kCombinedNodes; distance *= 2) {
            for (int32_t i = 0; i < kCombinedNodes; i += 2 * distance) {
                if (found[i + distance]) combine(*found[i], *found[i + distance]);
            }
        }
        const int32_t first_cta = partials.cta_of(first_partial);
        const PartialNode first = largest_node(first_partial, partials.made_by(first_cta), partials.count);
        store(num_nodes <= kCombinedNodes, slot_of(call.schedule.slots_per_cta, first_cta, first), partials, *found[0]);
        return true;
    }

    void run(int32_t cta) {
        call.for_each_run(cta, [&](int32_t sequence, const SplitRun& run, const TilePartials& partials) {
            const int64_t tile = int64_t{sequence} * call.schedule.tiles_per_sequence + run.tile_idx;
            const PartialRange own = partials.made_by(cta);
            const int32_t partial = call.schedule.splits_are_partials ? run.first : own.begin;
            const PartialNode made = largest_node(partial, {own.begin, partial + 1}, partials.count);
            Combined combined{tile, partial, partial + 1, static_cast<uint64_t>(partial) + 17};
            for (int32_t level = 0; level < made.level; ++level) {
                const int32_t index = partial >> level;
                if (index % 2 == 0) continue;
                Combined left =
                    at(slot_of(call.schedule.slots_per_cta, cta, {level, index - 1}), tile, (index - 1) << level);
                combine(left, combined);
                combined = left;
            }
            store(made.holds_all(partials.count), slot_of(call.schedule.slots_per_cta, cta, made), partials, combined);
            if (own.end - own.begin == partials.count || partial + 1 < own.end) return;
            PartialRange nodes = own;
            int32_t num_nodes = partials.count;
            for (int step = 0;; ++step) {
                const int32_t first = nodes.begin / kCombinedNodes, last = (nodes.end - 1) / kCombinedNodes;
                const bool has_first = bring(tile, partials, own, step, first, nodes, num_nodes);
                const bool has_last =
                    first == last ? has_first : bring(tile, partials, own, step, last, nodes, num_nodes);
                if (num_nodes <= kCombinedNodes) return;
                nodes = {has_first ? first : first + 1, has_last ? last + 1 : last};
                if (nodes.begin >= nodes.end) return;
                num_nodes = ceil_div(num_nodes, kCombinedNodes);
            }
        });
    }
};

}  // namespace

// Writes a row of 9 numbers for each run of splits that a CTA takes: CTA, sequence, tile, first key, end key, number of
// splits, index of the run's partial in its tile, number of the tile's partials, how many of these are the CTA's.
// Returns the number of rows. facts[0 … 3] are the numbers of CTAs, slots, counters, and splits per CTA.
extern "C" int64_t decode_schedule(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads,
                                   int32_t row_tiles, int64_t num_splits, int32_t batch_invariant,
                                   int32_t resident_ctas, int64_t* facts, int64_t* rows) {
    const Call call(lengths, batch, shape, kv_heads, row_tiles, num_splits, batch_invariant, resident_ctas);
    facts[0] = call.schedule.num_ctas, facts[1] = num_workspace_slots(call.schedule),
    facts[2] = num_counters(call.schedule);
    facts[3] = call.run;
    int64_t num_rows = 0;
    for (int32_t cta = 0; cta < call.schedule.num_ctas; ++cta) {
        call.for_each_run(cta, [&](int32_t sequence, const SplitRun& run, const TilePartials& partials) {
            const PartialRange own = partials.made_by(cta);
            int64_t* row = rows + 9 * num_rows++;
            row[0] = cta, row[1] = sequence, row[2] = run.tile_idx, row[3] = run.begin_key, row[4] = run.end_key;
            row[5] = run.count, row[6] = call.schedule.splits_are_partials ? run.first : own.begin;
            row[7] = partials.count, row[8] = own.end - own.begin;
        });
    }
    return num_rows;
}

// Runs the CTAs one after the other, in an order that the seed gives. results[tile] is a hash of the order in which the
// tile's partials are combined. Returns false if a CTA finds a wrong node in a slot, or a tile gets no result.
extern "C" bool decode_combines(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads,
                                int32_t row_tiles, int64_t num_splits, int32_t batch_invariant, int32_t resident_ctas,
                                int32_t seed, uint64_t* results) {
    const Call call(lengths, batch, shape, kv_heads, row_tiles, num_splits, batch_invariant, resident_ctas);
    Simulation simulation{call, {}, {}, {}};
    std::vector<int32_t> order(static_cast<size_t>(call.schedule.num_ctas));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<uint32_t>(seed)));
    for (const int32_t cta : order) simulation.run(cta);
    const int64_t tiles = int64_t{batch} * call.schedule.tiles_per_sequence;
    for (int64_t tile = 0; tile < tiles; ++tile) results[tile] = simulation.results[tile];
    const bool all_zero = std::all_of(simulation.arrived.begin(), simulation.arrived.end(),
                                      [](const auto& counter) { return counter.second == 0; });
    return simulation.is_right && all_zero && static_cast<int64_t>(simulation.results.size()) == tiles;
}
