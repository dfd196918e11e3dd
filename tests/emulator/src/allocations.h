// Memory that an allocator with red zones has handed out: what tensors own while the tracking is on. Launches take the
// live allocations as memory that they may touch. Knows nothing of torch: torch_allocator.cpp feeds it.
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

// Every block lies between two red zones, which are filled with a pattern and verified when it is freed and on demand.
// Fresh memory and freed memory are poisoned with 0xff (NaN in every floating-point type). Freed blocks stay in
// quarantine for a while, so that their addresses do not belong to somebody else at once. Any thread may call.
class TrackedAllocations {
  public:
    static constexpr uint64_t kAlignment = 64;                        // torch's own, of the host's memory
    static constexpr uint64_t kDeviceAlignment = 256;                 // cudaMalloc's
    static constexpr uint64_t kQuarantineBytes = uint64_t{64} << 20;  // red zones included

    // The only one. It is never destroyed: tensors may be freed when nearly all else of the process is gone.
    static TrackedAllocations& instance();

    // A block's owner is the number of a device, or one of these.
    static constexpr int kHost = -1;    // memory of torch's allocator: every launch may touch it
    static constexpr int kPinned = -2;  // of cudaHostAlloc: likewise

    void* allocate(size_t bytes, int owner = kHost) noexcept;  // nullptr: there is no memory, or `bytes` is 0
    void deallocate(void* begin) noexcept;                     // of `allocate`; nullptr is nothing

    // Memory of others that launches may touch all the same, until `disallow` of what is returned.
    uint64_t allow(uint64_t begin, uint64_t bytes, const std::string& name);
    void disallow(uint64_t serial);
    // What messages call the allocation that holds the address; false: there is none.
    bool label(uint64_t address, const std::string& name);

    // For GlobalMemory: what launches on a device may touch, and what is in quarantine (with `is_live` false). kHost: on
    // any device.
    std::vector<Allocation> snapshot(int device = kHost) const;

    struct Found {
        uint64_t begin, end;
        int owner;
        bool is_live;
    };
    // The block that holds the address, freed ones in quarantine included.
    std::optional<Found> find(uint64_t address) const;
    uint64_t live_bytes(int owner) const;
    // What was found written where nothing may write, since the last call: red zones, and memory after its free.
    std::vector<std::string> verify();

  private:
    struct Block {
        uint64_t begin, end;  // as asked for, to the byte
        uint64_t zone_bytes;  // before and, from `end` on, at least so many after it
        uint64_t serial;
        int owner;
        std::string label;
    };
    static std::string name_of(const Block& block);
    static uint64_t outer_end(const Block& block);
    static uint64_t outer_bytes(const Block& block);  // with both red zones
    void check_zones(const Block& block);
    void check_poison(const Block& block);
    void release_oldest();

    mutable std::mutex mutex_;
    std::map<uint64_t, Block> live_;          // by begin
    std::map<uint64_t, Allocation> foreign_;  // of `allow`, by serial
    std::deque<Block> quarantine_;
    uint64_t quarantine_bytes_ = 0, next_serial_ = 1;
    std::vector<std::string> damages_;
};

}  // namespace emulator
