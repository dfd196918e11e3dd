// The split plan as Python calls it: what every CTA of a plan takes, from the functions that the kernels compile.
#include <cstdint>

#include "decode/split_plan.h"

// One row of 10 numbers a tile of a CTA: CTA, sequence, tile, first key, end key, slot, whole, units, which of the tile's
// parts this is, and of how many. Returns how many rows; plan[0 … 2] are the CTAs, the slots and the largest share.
extern "C" int64_t decode_plan(const int32_t* lengths, int32_t batch, const int32_t* shape, int32_t kv_heads,
                               int32_t row_tiles, int64_t num_splits, int32_t batch_invariant, int32_t cta_slots,
                               int64_t* plan_facts, int64_t* rows) {
    using namespace fastattn;
    constexpr int32_t kBlockKeys = 64;
    const SequenceShape sequences{shape[0], shape[1], shape[2], shape[3]};
    const SplitPlan plan =
        split_plan(sequences, batch, kv_heads, row_tiles, kBlockKeys, num_splits, batch_invariant != 0, cta_slots);
    const auto tokens = [&](int32_t sequence) { return cached_sequence(sequences, lengths[sequence]); };
    const auto units = [&](int32_t sequence) { return tile_units(plan, tokens(sequence), kBlockKeys); };
    int64_t total = 0, num_rows = 0;
    for (int32_t i = 0; i < batch; ++i) total += int64_t{plan.tiles_per_sequence} * units(i).num_units;
    const int64_t share = plan.num_ctas > 0 ? units_per_cta(plan, total) : 0;
    plan_facts[0] = plan.num_ctas;
    plan_facts[1] = num_slots(plan);
    plan_facts[2] = share;
    for (int32_t cta = 0; cta < plan.num_ctas; ++cta) {
        const int64_t begin = cta * share, end = std::min(begin + share, total);
        for (int64_t unit = begin; unit < end;) {
            int32_t sequence = 0;
            int64_t first_unit = 0;
            while (unit >= first_unit + int64_t{plan.tiles_per_sequence} * units(sequence).num_units) {
                first_unit += int64_t{plan.tiles_per_sequence} * units(sequence++).num_units;
            }
            const TileShare part = tile_share(units(sequence), tokens(sequence), kBlockKeys, first_unit, unit, end);
            const TileParts parts = tile_parts(plan, units(sequence), first_unit, part.tile_idx, share);
            int64_t* row = rows + 10 * num_rows++;
            row[0] = cta, row[1] = sequence, row[2] = part.tile_idx, row[3] = part.begin_key, row[4] = part.end_key;
            row[5] = parts.slot(cta - parts.first_cta), row[6] = part.is_whole, row[7] = part.count;
            row[8] = cta - parts.first_cta, row[9] = parts.count;
            unit += part.count;
        }
    }
    return num_rows;
}
