// Which part of a matmul each CTA computes: a tile of the result over a range of the sum.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// How many CTAs share a tile, at most 255. Where one for each would keep less than nine tenths of the multiprocessors
// busy, the smallest number that does better; but each has at least kMinSteps steps, to fill its pipeline.
inline int32_t num_splits(int64_t tiles, int32_t steps, int32_t multiprocessors) {
    constexpr int32_t kMinSteps = 4, kMaxSplits = 255;
    const int64_t wanted = (9 * int64_t{multiprocessors} + 10 * tiles - 1) / (10 * tiles);
    return static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>({steps / kMinSteps, wanted, kMaxSplits})));
}

struct MatmulWork {
    int32_t tile, token_tile, output_tile;
    int32_t split, begin_step, end_step;
};

// The part of a CTA. All tokens pass over kGroup blocks of weights, which stay in L2 meanwhile, then over the next ones. CTAs that share a
// tile lie far apart.
FASTATTN_HOST_DEVICE MatmulWork matmul_work(int32_t cta, int32_t token_tiles, int32_t output_tiles, int32_t steps,
                                            int32_t splits) {
    constexpr int32_t kGroup = 8;  // of 128 outputs
    const int32_t tiles = token_tiles * output_tiles, split = cta / tiles, tile = cta % tiles;
    const int32_t first_output_tile = tile / (kGroup * token_tiles) * kGroup;
    const int32_t left = output_tiles - first_output_tile, width = left < kGroup ? left : kGroup;
    const int32_t in_group = tile % (kGroup * token_tiles);
    const int32_t shortest = steps / splits, longer = steps % splits;  // the first splits have one step more
    const int32_t begin_step = split * shortest + (split < longer ? split : longer);
    return {tile,  in_group / width, first_output_tile + in_group % width,
            split, begin_step,       begin_step + shortest + (split < longer)};
}

}  // namespace fastattn
