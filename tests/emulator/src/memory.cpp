#include "memory.h"

#include <algorithm>
#include <sstream>

namespace emulator {

GlobalMemory::GlobalMemory(std::vector<Allocation> allocations) : allocations_(std::move(allocations)) {
    std::sort(allocations_.begin(), allocations_.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    for (const Allocation& allocation : allocations_) {
        if (allocation.begin == allocation.end || !allocation.is_live) continue;
        // Only true overlaps (views of one tensor) are merged: adjacent allocations may be two tensors.
        if (!regions_.empty() && allocation.begin < regions_.back().end) {
            regions_.back().end = std::max(regions_.back().end, allocation.end);
        } else {
            regions_.push_back({allocation.begin, allocation.end});
        }
    }
}

GlobalMemory::Region GlobalMemory::find(uint64_t address, uint64_t bytes) const {
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                        [](uint64_t value, const Region& region) { return value < region.begin; });
    if (after == regions_.begin()) return {};
    const Region& region = *std::prev(after);
    return address < region.end && is_inside(address, bytes, region.end) ? region : Region{};
}

std::string GlobalMemory::describe(uint64_t address, uint64_t bytes) const {
    const Allocation* nearest = nullptr;
    uint64_t distance = ~uint64_t{0};
    for (const Allocation& allocation : allocations_) {
        const uint64_t away = address < allocation.begin                   ? allocation.begin - address
                              : !is_inside(address, bytes, allocation.end) ? address - allocation.end + bytes
                                                                           : 0;
        // If a tensor and its storage are equally near, names the tensor.
        const bool is_smaller = nearest != nullptr && allocation.end - allocation.begin < nearest->end - nearest->begin;
        if (away < distance || (away == distance && is_smaller)) distance = away, nearest = &allocation;
    }
    std::ostringstream text;
    text << bytes << " bytes at 0x" << std::hex << address << std::dec;
    if (nearest == nullptr) return text.str() + ": this launch was given no memory";
    if (distance == 0) {
        text << ", which is in " << nearest->name;
    } else if (address < nearest->begin) {
        text << ", " << distance << " bytes before the start of " << nearest->name;
    } else {
        text << ", reaching " << distance << " bytes past the end of " << nearest->name;
    }
    text << " (" << nearest->end - nearest->begin << (nearest->is_live ? " bytes)" : " bytes, freed)");
    return text.str();
}

std::string GlobalMemory::name(uint64_t address) const {
    const Allocation* smallest = nullptr;  // prefers a tensor to the storage that contains it
    for (const Allocation& allocation : allocations_) {
        if (!allocation.is_live || address < allocation.begin || address >= allocation.end) continue;
        const uint64_t bytes = allocation.end - allocation.begin;
        if (smallest == nullptr || bytes < smallest->end - smallest->begin) smallest = &allocation;
    }
    std::ostringstream text;
    if (smallest == nullptr) {
        text << "0x" << std::hex << address;
    } else {
        text << "byte " << address - smallest->begin << " of " << smallest->name;
    }
    return text.str();
}

}  // namespace emulator
