// The binary tree in which the partials of a work tile become its result.
//
// A partial is what one CTA made of some keys of a tile: for each row a maximum, a sum and a vector, in fp32. The
// partials of a tile are numbered in the order of their keys. Node (level, index) of the tree holds those partials
// [index << level, (index + 1) << level) that exist. It is combined(node (level - 1, 2 * index), node (level - 1, 2 *
// index + 1)), or the left one unchanged where the right one holds no partial. The result is the node that holds all.
//
//   partials  0   1   2   3   4      a CTA that has partials 1 … 4 makes nodes 1, (2 3) and (4);
//              \ /     \ /    |      the CTA that comes last combines 0 with 1, that with (2 3), and that with (4)
//               \_______/     |
//                    \________/
//
// So num_partials alone decides which values are combined, and in which order. A CTA may make the nodes that hold only
// its own partials, and any other CTA the rest. All execute the same operations, with roundings that the source fixes
// (finish_row.cuh), on the same fp32 numbers. The bits of the result therefore depend neither on which partials one CTA
// makes, nor on which CTA comes last.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {
struct PartialRange {
    int32_t begin, end;
};

struct PartialNode {
    int32_t level, index;

    FASTATTN_HOST_DEVICE int32_t first_partial() const { return index << level; }

    FASTATTN_HOST_DEVICE bool holds_all(int32_t num_partials) const { return index == 0 && num_partials <= 1 << level; }
};

// Returns the largest node that holds `partial`, and no partials but `own`.
FASTATTN_HOST_DEVICE PartialNode largest_node(int32_t partial, PartialRange own, int32_t num_partials) {
    PartialNode node{0, partial};
    while (!node.holds_all(num_partials)) {
        const PartialNode parent{node.level + 1, node.index / 2};
        const int32_t end = (parent.index + 1) << parent.level;
        if (parent.first_partial() < own.begin || (end < num_partials ? end : num_partials) > own.end) break;
        node = parent;
    }
    return node;
}

// The partials of a tile. Partial 0 has number `first` on the line of all partials, and CTA c makes numbers
// [c * per_cta, (c + 1) * per_cta).
struct TilePartials {
    int32_t count;
    int64_t first, per_cta;

    FASTATTN_HOST_DEVICE int32_t cta_of(int32_t partial) const {
        return static_cast<int32_t>((first + partial) / per_cta);
    }

    FASTATTN_HOST_DEVICE PartialRange made_by(int32_t cta) const {
        const int64_t begin = cta * per_cta - first, end = begin + per_cta;
        return {static_cast<int32_t>(begin > 0 ? begin : 0), static_cast<int32_t>(end < count ? end : count)};
    }
};

// Returns the workspace slot where a CTA leaves a node of its own partials until the node is combined.
//
// A CTA has at most two split tiles: one in which its splits begin, and one in which they end. In the first tile's
// tree, the nodes that it leaves to others are right children: where it makes a left child, it makes the right sibling
// too, unless that holds no partial. In the second tile's tree they are left children, because the CTA has that tile
// from its beginning on. Nodes that wait for a right sibling of the same CTA are left children too, in any tile. In a
// tile of which other CTAs have both ends, it leaves children of both kinds. No two nodes of one level and kind ever
// wait at the same time. So two slots for each level are enough, and what a CTA does next never touches what others
// still have to read. Where it has only one partial of each tile, at most two nodes wait: the left child of level 0,
// and any other.
FASTATTN_HOST_DEVICE int64_t slot_of(int32_t slots_per_cta, int32_t cta, PartialNode node) {
    const int32_t own = 2 * node.level + node.index % 2, last = slots_per_cta - 1;
    return int64_t{cta} * slots_per_cta + (own < last ? own : last);
}

// The most rounds in which the partials of a tile become one; in each, CTAs combine several nodes at once. Six suffice
// for 32^6 partials with 32 nodes at once (flash-decoding), more than a capacity below 2^30 has blocks of 64 keys. They
// suffice for the partials of 4^6 CTAs with 4 nodes (attention), more than any GPU runs at a time.
inline constexpr int kCombineRounds = 6;

// The number of nodes whose values a thread loads at a time, in one trip to L2.
inline constexpr int kNodesOfOneTrip = 16;

}  // namespace fastattn
