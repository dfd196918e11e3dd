// The binary tree in which the partials of a work tile become its result.
//
// A partial is what one CTA has computed from some keys of a tile: for each row a maximum, a sum of exponentials and a
// vector of sums of P·V, in fp32. The partials of a tile are numbered in the order of their keys. Node (level, index)
// of the tree holds those partials [index << level, (index + 1) << level) that exist. The node is combined(left, right)
// of its children (level - 1, 2 * index) and (level - 1, 2 * index + 1). If the right child holds no partial, the node
// is the left child unchanged. The result is the node that holds all partials.
//
//   partials  0   1   2   3   4      a CTA that has partials 1 … 4 makes nodes 1, (2 3) and (4);
//              \ /     \ /    |      the CTA that comes last makes (0 1), then ((0 1) (2 3)), then the result with (4)
//               \_______/     |
//                    \________/
//
// So the number of partials decides which values are combined, and in which order; nothing else does. A CTA may make
// the nodes that hold only its own partials, and any other CTA the remaining nodes. All CTAs execute the same
// operations on the same fp32 numbers, and the source code fixes every rounding (finish_row.cuh). The bits of the
// result therefore depend neither on which partials one CTA makes, nor on which CTA comes last.
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

// Returns the largest node that holds `partial`, and holds only partials of `own`.
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

// The partials of a tile. The partials of all tiles are numbered along one line, on which partial 0 of this tile has
// number `first`. CTA c makes the partials with numbers [c * per_cta, (c + 1) * per_cta).
struct TilePartials {
    int32_t count;
    int64_t first, per_cta;

    FASTATTN_HOST_DEVICE int32_t cta_of(int32_t partial) const {
        const int64_t number = first + partial;
        return static_cast<int32_t>(per_cta == 1 ? number : number / per_cta);  // 1: as usual
    }

    FASTATTN_HOST_DEVICE PartialRange made_by(int32_t cta) const {
        const int64_t begin = cta * per_cta - first, end = begin + per_cta;
        return {static_cast<int32_t>(begin > 0 ? begin : 0), static_cast<int32_t>(end < count ? end : count)};
    }
};

// Returns the workspace slot where a CTA leaves a node of its own partials until the node is combined.
//
// A CTA has at most two split tiles: the tile in which its splits begin, and the tile in which they end. In the tree of
// the first tile, the nodes that the CTA leaves to others are right children: if the CTA makes a left child, it also
// makes the right sibling, unless this sibling holds no partial. In the tree of the second tile, the nodes that it
// leaves are left children, because the CTA has this tile from its beginning on. Nodes that wait for a right sibling of
// the same CTA are left children in any tile. If other CTAs have both ends of a tile, the CTA leaves children of both
// kinds. No two nodes of the same level and kind ever wait at the same time. So two slots for each level are enough,
// and a CTA never overwrites a node that others still have to read. If a CTA has only one partial of each tile, at most
// two nodes wait: the left child of level 0, and one other node.
FASTATTN_HOST_DEVICE int64_t slot_of(int32_t slots_per_cta, int32_t cta, PartialNode node) {
    const int32_t own = 2 * node.level + node.index % 2, last = slots_per_cta - 1;
    return int64_t{cta} * slots_per_cta + (own < last ? own : last);
}

// The largest number of rounds that it takes to combine the partials of a tile. In each round, CTAs combine several
// nodes at once. Six rounds of 16 nodes (flash-decoding; some kernels combine 32) suffice for 16^6 partials, as many as
// the largest capacity, 2^30 keys, has blocks of 64 keys. Six rounds of 4 nodes (attention) suffice for the partials of
// 4^6 CTAs, more than any GPU runs at a time.
inline constexpr int kCombineRounds = 6;

// The number of nodes whose values a thread loads at a time, in one trip to L2.
inline constexpr int kNodesOfOneTrip = 16;

}  // namespace fastattn
