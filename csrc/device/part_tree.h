// The binary tree in which the parts of a tile become its result.
//
// A part is what one CTA made of some keys of a tile: for each row a maximum, a sum and a vector, in fp32. The parts of
// a tile are numbered by their keys. Node (level, index) of the tree holds parts [index << level, (index + 1) <<
// level), as many of them as exist: it is merged(node (level - 1, 2 * index), node (level - 1, 2 * index + 1)), or the
// left one of the two unchanged where the right one holds no part. The node that holds all parts is the result.
//
//   parts   0   1   2   3   4        a CTA that has parts 1 … 4 makes nodes 1, (2 3) and (4);
//            \ /     \ /    |        the CTA that comes last merges 0 with 1, that with (2 3), and that with (4)
//             \_______/     |
//                  \________/
//
// So num_parts alone decides which values are merged with which, and in which order. A CTA may make the nodes that hold
// nothing but its own parts, and any other CTA the rest: they execute the same operations, each with a rounding that
// the source fixes (finish_row.cuh), on the same fp32 numbers, which are never rounded on their way. The bits of the
// result therefore do not depend on where the parts of one CTA end and those of the next begin, nor on who comes last.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// Parts [begin, end) of a tile.
struct PartRange {
    int32_t begin, end;
};

struct PartNode {
    int32_t level, index;

    FASTATTN_HOST_DEVICE int32_t first_part() const { return index << level; }

    FASTATTN_HOST_DEVICE bool holds_all(int32_t num_parts) const { return index == 0 && num_parts <= 1 << level; }
};

// The largest node with `part` among those that hold no other parts than `own`.
FASTATTN_HOST_DEVICE PartNode largest_node(int32_t part, PartRange own, int32_t num_parts) {
    PartNode node{0, part};
    while (!node.holds_all(num_parts)) {
        const PartNode parent{node.level + 1, node.index / 2};
        const int32_t end = (parent.index + 1) << parent.level;
        if (parent.first_part() < own.begin || (end < num_parts ? end : num_parts) > own.end) break;
        node = parent;
    }
    return node;
}

// The parts of a tile. Part 0 has number `first` on the line of all parts, and CTA c makes numbers
// [c * per_cta, (c + 1) * per_cta).
struct TileParts {
    int32_t count;
    int64_t first, per_cta;

    FASTATTN_HOST_DEVICE int32_t cta_of(int32_t part) const { return static_cast<int32_t>((first + part) / per_cta); }

    FASTATTN_HOST_DEVICE PartRange of_cta(int32_t cta) const {
        const int64_t begin = cta * per_cta - first, end = begin + per_cta;
        return {static_cast<int32_t>(begin > 0 ? begin : 0), static_cast<int32_t>(end < count ? end : count)};
    }
};

// The slot of the workspace where a CTA leaves a node that holds its own parts alone, until that is merged.
//
// A CTA shares two tiles with others at most: one in which its share begins, and one in which it ends. In the tree of
// the first, the nodes that it leaves to others are right children: a CTA that makes a left child there makes its right
// sibling too, unless that holds no part. In the tree of the second they are left children, because the CTA has the
// tile from its beginning on. Nodes that wait until the CTA itself has made their right siblings are left children too,
// in any tile. In a tile that it shares at both ends, it leaves children of both kinds. No two nodes of one level and
// kind ever wait at the same time: so two slots for each level are enough, and what a CTA does next never touches what
// others still have to read. Where the CTA has one part of each tile only, these are two nodes at most: the left child
// of level 0, and any other.
FASTATTN_HOST_DEVICE int64_t slot_of(int32_t slots_per_cta, int32_t cta, PartNode node) {
    const int32_t own = 2 * node.level + node.index % 2, last = slots_per_cta - 1;
    return int64_t{cta} * slots_per_cta + (own < last ? own : last);
}

// In how many steps a tile's parts become one at most, each step by CTAs that merge several nodes side by side. 16 at a
// time (flash-decoding): 16^6 parts, as many blocks of 64 keys as a capacity below 2^30 has at most. 4 at a time
// (attention): 4^6 CTAs, more than any GPU runs at a time.
inline constexpr int kMergeSteps = 6;

}  // namespace fastattn
