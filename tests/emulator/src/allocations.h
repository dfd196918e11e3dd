// An allocator with red zones, which owns the memory of tensors while tracking is on. Launches may touch its live
// allocations. It does not depend on torch: torch_allocator.cpp connects the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "memory.h"

namespace emulator {

// Every block lies between two red zones. They are filled with a pattern, which is verified on demand and when the
// block is freed. Fresh and freed memory is poisoned with 0xff (NaN in every floating-point type). Freed blocks stay in
// quarantine for a while, so that their addresses are not reused at once. All functions are thread-safe.
class TrackedAllocations {
  public:
    static constexpr uint64_t kAlignment = 64;                        // that of torch's CPU allocator
    static constexpr uint64_t kDeviceAlignment = 256;                 // that of cudaMalloc
    static constexpr uint64_t kQuarantineBytes = uint64_t{64} << 20;  // red zones included

    // Returns the only instance. It is never destroyed, because tensors may be freed late during the process's exit.
    static TrackedAllocations& instance();

    // A block's owner is the number of a device, or one of these, whose memory every launch may touch.
    static constexpr int kHost = -1;    // torch's CPU allocator
    static constexpr int kPinned = -2;  // cudaHostAlloc

    void* allocate(size_t bytes, int owner = kHost) noexcept;  // nullptr: out of memory, or `bytes` is 0
    void deallocate(void* begin) noexcept;                     // `begin`: from `allocate`, or nullptr

    // Lets launches touch memory that this allocator does not own, until `disallow` gets the number returned here.
    uint64_t allow(uint64_t begin, uint64_t bytes, const std::string& name);
    void disallow(uint64_t serial);
    // Sets the name that messages use for the allocation that holds the address. Returns false if there is none.
    bool label(uint64_t address, const std::string& name);

    // Returns the memory that launches on a device may touch (kHost: on any device), and the blocks in quarantine with
    // `is_live` false, for GlobalMemory.
    std::vector<Allocation> snapshot(int device = kHost) const;

    struct Found {
        uint64_t begin, end;
        int owner;
        bool is_live;
    };
    // Returns the block that holds the address; it may be freed and in quarantine.
    std::optional<Found> find(uint64_t address) const;
    uint64_t live_bytes(int owner) const;
    // Checks all red zones and the freed blocks in quarantine. Returns the illegal writes found since the last call.
    std::vector<std::string> verify();

  private:
    struct Block {
        uint64_t begin, end;  // as requested, to the byte
        uint64_t zone_bytes;  // size of the red zone before it; the one after it is at least as large
        uint64_t serial;
        int owner;
        std::string label;
    };
    static std::string name_of(const Block& block);
    static uint64_t outer_end(const Block& block);
    static uint64_t outer_bytes(const Block& block);  // size including both red zones
    void check_zones(const Block& block);
    void check_poison(const Block& block);
    void release_oldest();

    mutable std::mutex mutex_;
    std::map<uint64_t, Block> live_;          // by begin
    std::map<uint64_t, Allocation> foreign_;  // from `allow`, by serial
    std::deque<Block> quarantine_;
    uint64_t quarantine_bytes_ = 0, next_serial_ = 1;
    std::vector<std::string> damages_;
};

}  // namespace emulator
