// The binary tree in which the parts of a tile become its result.
//
// A part is what one CTA made of some keys of a tile: for each row a maximum, a sum and a vector, in fp32. The parts of a
// tile are numbered by their keys. Node (level, index) of the tree holds parts [index << level, (index + 1) << level), as
// many of them as exist: it is merged(node (level - 1, 2 * index), node (level - 1, 2 * index + 1)), or the left one of
// the two unchanged where the right one holds no part. The node that holds all parts is the result.
//
//   parts   0   1   2   3   4        a CTA that has parts 1 … 4 makes nodes 1, (2 3) and (4);
//            \ /     \ /    |        the CTA that comes last merges 0 with 1, that with (2 3), and that with (4)
//             \_______/     |
//                  \________/
//
// So num_parts alone decides which values are merged with which, and in which order. A CTA may make the nodes that hold
// nothing but its own parts, and any other CTA the rest: they execute the same operations, each with a rounding that the
// source fixes (finish_row.cuh), on the same fp32 numbers, which are never rounded on their way. The bits of the result
// therefore do not depend on where the parts of one CTA end and those of the next begin, nor on who comes last.
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

// A CTA that merges nodes which several CTAs have made takes so many side by side, four levels of the tree at once: one
// level at a time would wait four times as often for memory.
inline constexpr int32_t kLog2MergedNodes = 4, kMergedNodes = 1 << kLog2MergedNodes;
// 16^6 parts: as many blocks of 64 keys as a capacity below 2^30 has at most.
inline constexpr int32_t kMergeSteps = 6;

}  // namespace fastattn
