// Assigns slots to a function's registers by linear scan (Poletto and Sarkar, "Linear scan register allocation") over
// the intervals of instructions in which they are alive.
#include <algorithm>
#include <unordered_map>

#include "decoder.h"
#include "families/control.h"

namespace emulator {
namespace {

// A basic block. It begins at a branch target or after a branch.
struct Block {
    int begin, end;
    std::vector<int> successors;
};

std::vector<Block> blocks_of(const Program& program, const FunctionCode& code, std::vector<int>& block_of) {
    const int count = code.end - code.first;
    std::vector<bool> begins(count + 1, false);
    begins[0] = true;
    std::vector<std::vector<int>> successors(count);
    for (int i = 0; i < count; ++i) {
        successors[i] = successors_of(program, code, code.first + i);
        for (int& next : successors[i]) next -= code.first;
        if (successors[i].size() == 1 && successors[i][0] == i + 1) continue;
        for (const int next : successors[i]) begins[next] = true;
        begins[i + 1] = true;
    }
    std::vector<Block> blocks;
    block_of.assign(count + 1, 0);
    for (int i = 0; i < count; ++i) {
        if (begins[i]) blocks.push_back({i, i, {}});
        blocks.back().end = i + 1;
        block_of[i] = static_cast<int>(blocks.size()) - 1;
    }
    for (Block& block : blocks) {
        for (const int next : successors[block.end - 1]) {
            if (next < count) block.successors.push_back(block_of[next]);
        }
    }
    return blocks;
}

struct Interval {
    Slot slot;  // its slot in the first pass
    int bytes;
    bool is_shared;  // false: no other register may have its slot
    int first = -1, last = -1;
    int block = -1;           // the only block that uses it; -1: none so far; -2: several
    bool is_exposed = false;  // may be read before it is written, so that it is alive from the beginning of its block
    int number = -1;          // its bit in the data-flow sets; -1: alive in one block only

    void extend(int from, int to) {
        if (first < 0 || from < first) first = from;
        last = std::max(last, to);
    }
};

using Bits = std::vector<uint64_t>;
void set(Bits& bits, int i) {
    bits[i / 64] |= uint64_t{1} << (i % 64);
}
bool has(const Bits& bits, int i) {
    return (bits[i / 64] >> (i % 64) & 1) != 0;
}

}  // namespace

Decoder::Registers allocate_registers(const Program& program, const FunctionCode& decoded, const Decoder& decoder,
                                      FunctionCode& code) {
    std::vector<Interval> intervals;
    std::unordered_map<Slot, int> by_slot;
    for (const auto& scope : decoder.registers()) {
        for (const auto& [name, reg] : scope) {
            by_slot[reg.slot] = static_cast<int>(intervals.size());
            intervals.push_back({reg.slot, reg.type == Type::kPred ? 4 : width_of(reg.type) * kWarpSize, true});
        }
    }
    // Registers of wgmma keep a slot of their own: the wait for it writes accumulators, which it finds by their slot.
    for (int i = decoded.first; i < decoded.end; ++i) {
        const int32_t tracked = program.operations[i].tracked;
        if (tracked < 0) continue;
        for (const auto* list : {&program.tracked_accesses[tracked].reads, &program.tracked_accesses[tracked].writes}) {
            for (const TrackedRegister& reg : *list) intervals[by_slot.at(reg.slot)].is_shared = false;
        }
    }

    std::vector<int> block_of;
    const std::vector<Block> blocks = blocks_of(program, decoded, block_of);
    const int count = decoded.end - decoded.first;
    const auto each_access = [&](int i, auto&& function) {  // reads first
        const Decoder::Accesses& accesses = decoder.accesses()[i];
        for (const auto* list : {&accesses.reads, &accesses.other_reads}) {
            for (const Slot slot : *list) function(intervals[by_slot.at(slot)], false);
        }
        for (const auto* list : {&accesses.writes, &accesses.other_writes}) {
            for (const Slot slot : *list) function(intervals[by_slot.at(slot)], true);
        }
    };
    // A guarded write does not end the life of the old value, which other lanes keep.
    const auto replaces = [&](int i, bool is_write) {
        return is_write && !program.operations[decoded.first + i].is_guarded;
    };
    for (int i = 0; i < count; ++i) {
        each_access(i, [&](Interval& interval, bool is_write) {
            if (interval.block == -1) {
                interval.block = block_of[i];
                interval.is_exposed = !replaces(i, is_write);
            } else if (interval.block != block_of[i]) {
                interval.block = -2;
            }
            interval.extend(i, i);
        });
    }
    std::vector<Interval*> numbered;
    for (Interval& interval : intervals) {
        if (interval.block != -2 && !interval.is_exposed) continue;
        interval.number = static_cast<int>(numbered.size());
        numbered.push_back(&interval);
    }

    // Computes which of the numbered registers are alive at the beginning and at the end of each block.
    const Bits none((numbered.size() + 63) / 64);
    std::vector<Bits> used(blocks.size(), none), replaced(blocks.size(), none), in(blocks.size(), none);
    for (size_t b = 0; b < blocks.size(); ++b) {
        for (int i = blocks[b].begin; i < blocks[b].end; ++i) {
            each_access(i, [&](Interval& interval, bool is_write) {
                if (interval.number < 0 || has(replaced[b], interval.number)) return;
                set(replaces(i, is_write) ? replaced[b] : used[b], interval.number);
            });
        }
    }
    const auto out_of = [&](size_t b) {
        Bits out = none;
        for (const int next : blocks[b].successors) {
            for (size_t w = 0; w < out.size(); ++w) out[w] |= in[next][w];
        }
        return out;
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t b = blocks.size(); b-- > 0;) {
            const Bits out = out_of(b);
            for (size_t w = 0; w < out.size(); ++w) {
                const uint64_t alive = used[b][w] | (out[w] & ~replaced[b][w]);
                changed |= alive != in[b][w];
                in[b][w] = alive;
            }
        }
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
        const Bits out = out_of(b);
        for (Interval* interval : numbered) {
            if (has(in[b], interval->number)) interval->extend(blocks[b].begin, blocks[b].begin);
            if (has(out, interval->number)) interval->extend(blocks[b].end - 1, blocks[b].end - 1);
        }
    }

    // A slot is free only after the last instruction of its interval, so that no result shares a slot with an operand.
    std::vector<Interval*> order;
    for (Interval& interval : intervals) order.push_back(&interval);
    std::sort(order.begin(), order.end(), [](const Interval* a, const Interval* b) {
        return a->first != b->first ? a->first < b->first : a->slot < b->slot;
    });
    const auto is_later = [](const Interval* a, const Interval* b) { return a->last > b->last; };
    std::vector<Interval*> alive;  // a heap
    std::unordered_map<int, std::vector<Slot>> free;
    std::unordered_map<Slot, Slot> slots;
    for (Interval* interval : order) {
        while (!alive.empty() && alive.front()->last < interval->first) {
            std::pop_heap(alive.begin(), alive.end(), is_later);
            free[alive.back()->bytes].push_back(slots[alive.back()->slot]);
            alive.pop_back();
        }
        std::vector<Slot>& candidates = free[interval->bytes];
        if (interval->is_shared && !candidates.empty()) {
            slots[interval->slot] = candidates.back();
            candidates.pop_back();
        } else {
            const size_t at = (code.image.size() + 31) / 32 * 32;
            code.image.resize(at + interval->bytes, std::byte{0xff});
            slots[interval->slot] = static_cast<Slot>(at);
        }
        if (!interval->is_shared) continue;
        alive.push_back(interval);
        std::push_heap(alive.begin(), alive.end(), is_later);
    }
    Decoder::Registers registers = decoder.registers();
    for (auto& scope : registers) {
        for (auto& [name, reg] : scope) reg.slot = slots[reg.slot];
    }
    return registers;
}

}  // namespace emulator
