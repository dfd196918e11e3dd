#include "allocations.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

namespace emulator {
namespace {

constexpr unsigned char kZonePattern = 0xa5, kPoison = 0xff;

uint64_t round_up(uint64_t bytes, uint64_t alignment = TrackedAllocations::kAlignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

// Red zones are as large as the block (within limits), so that an access one tile too far stays within them.
uint64_t zone_bytes_of(size_t bytes, uint64_t alignment) {
    return round_up(std::clamp<uint64_t>(bytes, 512, 1 << 16), alignment);
}

// Returns the offset of the first byte that differs from `value`, `bytes` if none does.
uint64_t first_other(uint64_t begin, uint64_t bytes, unsigned char value) {
    const auto* const data = reinterpret_cast<const unsigned char*>(begin);
    if (bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0)) return bytes;
    return static_cast<uint64_t>(std::find_if(data, data + bytes, [=](auto byte) { return byte != value; }) - data);
}

// Blocks of at least this size use mmap, so that their pages are returned at once. malloc would keep them for reuse.
constexpr uint64_t kLargeBytes = 1 << 20;

void* take_memory(uint64_t bytes, uint64_t alignment) {
    void* begin = nullptr;
    if (bytes < kLargeBytes) return posix_memalign(&begin, alignment, bytes) == 0 ? begin : nullptr;
    begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return begin == MAP_FAILED ? nullptr : begin;
}

void give_memory_back(uint64_t begin, uint64_t bytes) {
    if (bytes < kLargeBytes) return std::free(reinterpret_cast<void*>(begin));
    munmap(reinterpret_cast<void*>(begin), bytes);
}

void fill(uint64_t begin, uint64_t end, unsigned char value) {
    std::memset(reinterpret_cast<void*>(begin), value, end - begin);
}

}  // namespace

TrackedAllocations& TrackedAllocations::instance() {
    static auto* const only = new TrackedAllocations;
    return *only;
}

std::string TrackedAllocations::name_of(const Block& block) {
    return block.label.empty() ? "allocation " + std::to_string(block.serial) : block.label;
}

uint64_t TrackedAllocations::outer_end(const Block& block) {
    return round_up(block.end) + block.zone_bytes;
}

uint64_t TrackedAllocations::outer_bytes(const Block& block) {
    return outer_end(block) - (block.begin - block.zone_bytes);
}

void* TrackedAllocations::allocate(size_t bytes, int owner) noexcept {
    if (bytes == 0) return nullptr;
    const uint64_t alignment = owner == kHost ? kAlignment : kDeviceAlignment;
    const uint64_t zone_bytes = zone_bytes_of(bytes, alignment);
    const void* raw = bytes > SIZE_MAX / 2 ? nullptr : take_memory(round_up(bytes) + 2 * zone_bytes, alignment);
    if (raw == nullptr) return nullptr;
    const uint64_t begin = reinterpret_cast<uint64_t>(raw) + zone_bytes;
    Block block{begin, begin + bytes, zone_bytes, 0, owner, {}};
    fill(begin - zone_bytes, begin, kZonePattern);
    fill(begin, block.end, kPoison);
    fill(block.end, outer_end(block), kZonePattern);
    const std::lock_guard lock(mutex_);
    block.serial = next_serial_++;
    live_.emplace(begin, std::move(block));
    return reinterpret_cast<void*>(begin);
}

void TrackedAllocations::deallocate(void* begin) noexcept {
    if (begin == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(reinterpret_cast<uint64_t>(begin));
    if (found == live_.end()) std::abort();  // as glibc does for an invalid pointer
    check_zones(found->second);
    fill(found->second.begin, found->second.end, kPoison);
    quarantine_bytes_ += outer_bytes(found->second);
    quarantine_.push_back(std::move(found->second));
    live_.erase(found);
    while (quarantine_bytes_ > kQuarantineBytes) release_oldest();
}

void TrackedAllocations::release_oldest() {
    const Block& block = quarantine_.front();
    check_poison(block);
    quarantine_bytes_ -= outer_bytes(block);
    give_memory_back(block.begin - block.zone_bytes, outer_bytes(block));
    quarantine_.pop_front();
}

uint64_t TrackedAllocations::allow(uint64_t begin, uint64_t bytes, const std::string& name) {
    const std::lock_guard lock(mutex_);
    foreign_[next_serial_] = {begin, begin + bytes, name};
    return next_serial_++;
}

void TrackedAllocations::disallow(uint64_t serial) {
    const std::lock_guard lock(mutex_);
    foreign_.erase(serial);
}

bool TrackedAllocations::label(uint64_t address, const std::string& name) {
    const std::lock_guard lock(mutex_);
    auto after = live_.upper_bound(address);
    if (after == live_.begin() || address >= (--after)->second.end) return false;
    after->second.label = name;
    return true;
}

std::vector<Allocation> TrackedAllocations::snapshot(int device) const {
    const std::lock_guard lock(mutex_);
    std::vector<Allocation> found;
    found.reserve(live_.size() + foreign_.size() + quarantine_.size());
    for (const auto& [begin, block] : live_) {
        const bool is_elsewhere = device >= 0 && block.owner >= 0 && block.owner != device;
        if (!is_elsewhere) found.push_back({block.begin, block.end, name_of(block)});
    }
    for (const auto& [serial, allocation] : foreign_) found.push_back(allocation);
    for (const Block& block : quarantine_) found.push_back({block.begin, block.end, name_of(block), false});
    return found;
}

std::optional<TrackedAllocations::Found> TrackedAllocations::find(uint64_t address) const {
    const std::lock_guard lock(mutex_);
    const auto after = live_.upper_bound(address);
    if (after != live_.begin()) {
        const Block& block = std::prev(after)->second;
        if (address < block.end) return Found{block.begin, block.end, block.owner, true};
    }
    for (const Block& block : quarantine_) {
        if (block.begin <= address && address < block.end) return Found{block.begin, block.end, block.owner, false};
    }
    return std::nullopt;
}

uint64_t TrackedAllocations::live_bytes(int owner) const {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = 0;
    for (const auto& [begin, block] : live_) bytes += block.owner == owner ? block.end - block.begin : 0;
    return bytes;
}

void TrackedAllocations::check_zones(const Block& block) {
    const uint64_t start = block.begin - block.zone_bytes, after_bytes = outer_end(block) - block.end;
    const uint64_t before = first_other(start, block.zone_bytes, kZonePattern);
    const uint64_t after = first_other(block.end, after_bytes, kZonePattern);
    if (before == block.zone_bytes && after == after_bytes) return;
    const auto size = static_cast<int64_t>(block.end - block.begin);
    const int64_t place = before == block.zone_bytes ? size + static_cast<int64_t>(after)
                                                     : static_cast<int64_t>(before - block.zone_bytes);
    damages_.push_back("written at byte " + std::to_string(place) + " of " + name_of(block) + " (" +
                       std::to_string(size) + " bytes)");
    // Restores the pattern, so that each damage is reported once.
    fill(start, block.begin, kZonePattern);
    fill(block.end, outer_end(block), kZonePattern);
}

void TrackedAllocations::check_poison(const Block& block) {
    const uint64_t bytes = block.end - block.begin, place = first_other(block.begin, bytes, kPoison);
    if (place == bytes) return;
    damages_.push_back("written at byte " + std::to_string(place) + " of " + name_of(block) + " (" +
                       std::to_string(bytes) + " bytes) after it was freed");
    fill(block.begin, block.end, kPoison);
}

std::vector<std::string> TrackedAllocations::verify() {
    const std::lock_guard lock(mutex_);
    for (const auto& [begin, block] : live_) check_zones(block);
    for (const Block& block : quarantine_) check_poison(block);
    return std::exchange(damages_, {});
}

}  // namespace emulator
