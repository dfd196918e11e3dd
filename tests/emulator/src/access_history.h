// Who touched each byte last: records of accesses, and of the asynchronous operations that made some of them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "vector_clock.h"

namespace emulator {

enum class Proxy : uint8_t { kGeneric, kAsync };

// An asynchronous operation of the launch.
enum class AsyncId : uint32_t {};

// Some bytes of a cell, as lanes of a warp touched them by one instruction or asynchronous operation.
struct Record {
    enum Flags : uint32_t {
        kWrite = 1,
        kStrong = 2,
        kScope = 4 | 8,  // of the strong; at which the completion of asynchronous ones is known
        kAsync = 16,
        kAsyncProxy = 32,
        kSilent = 64,  // a write of what was there already
        kSum = 128,    // adds floating numbers, in an order that should be fixed
    };
    static constexpr int kScopeShift = 2, kOperationShift = 8;

    uint32_t clock;  // of the warp; of an asynchronous operation: its AsyncId
    uint32_t place;  // operation of the program, flags
    uint32_t cluster;
    uint32_t lanes;
    uint16_t warp;   // of the cluster
    uint16_t bytes;  // which of the cell's

    bool has(uint32_t flags) const { return (place & flags) != 0; }
    int scope() const { return static_cast<int>(place & kScope) >> kScopeShift; }
    int lane() const { return __builtin_ctz(lanes); }
    uint32_t operation() const { return place >> kOperationShift; }
    bool is_by_same_instruction(const Record& other) const {
        return clock == other.clock && place == other.place && warp == other.warp && cluster == other.cluster;
    }
};
constexpr uint32_t kMostRecordedOperations = 1u << (32 - Record::kOperationShift);

// The records of 16 bytes of memory. A few are in the cell itself.
struct alignas(64) Cell {
    static constexpr uint64_t kBytes = 16;
    static constexpr uint32_t kFew = 2, kMost = 64;

    uint32_t count = 0, capacity = kFew;
    Record* many = nullptr;
    Record few[kFew];

    Cell() = default;
    ~Cell() { std::free(many); }
    Cell(const Cell&) = delete;
    Cell& operator=(const Cell&) = delete;

    Record* records() { return many != nullptr ? many : few; }
    void add(const Record& record);
};

// Two accesses to the same bytes that are not as they must be.
struct Conflict {
    enum class Kind : uint8_t {
        kUnordered,
        kTooNarrow,  // … but for an mbarrier's arrival or wait of scope .cta between CTAs
        kOpenSum,    // … but for additions of floating numbers whose order should be fixed
        kNeedsProxyFence,
        kBeyondEnd,  // of the CTA that owns the memory; `later` is the same as `earlier`
    };
    Kind kind;
    Record earlier, later;
    bool is_shared;
    uint64_t address;  // of the first byte that both touch; shared: the CTA's rank << 32 | offset
};

// Who knows this much of an mbarrier, or of one of the lanes that have waited, knows that an asynchronous operation has
// happened. An operation may have several such.
struct Completion {
    Agent agent;
    uint32_t clock;
    uint32_t lanes;    // whose part of the operation
    uint32_t waiters;  // 0: each lane has waited for its own part
    const Completion* next;
};

// The asynchronous operations of a launch. Lives as long as the records do; the host's threads share it.
class AsyncOperations {
  public:
    struct Operation {
        std::atomic<const Completion*> completions;
        Proxy proxy;
    };

    AsyncOperations();
    ~AsyncOperations();
    AsyncOperations(const AsyncOperations&) = delete;
    AsyncOperations& operator=(const AsyncOperations&) = delete;

    Operation& at(AsyncId id) {
        const auto number = static_cast<uint32_t>(id);
        return chunks_[number / kChunk].load(std::memory_order_acquire)[number % kChunk];
    }
    uint32_t take_chunk();  // the first of kChunk that are the caller's
    static constexpr uint32_t kChunk = 128;

    // Keeps completions until the end of the launch.
    void keep(std::deque<Completion>&& completions);

  private:
    static constexpr uint32_t kMostChunks = 1u << 20;
    std::atomic<Operation*>* chunks_;
    std::atomic<uint32_t> num_chunks_{0};
    std::mutex mutex_;
    std::deque<std::deque<Completion>> kept_;
};

// For sections of a few instructions. The holder is descheduled now and then, so that waiters yield.
class SpinLock {
  public:
    void lock() {
        while (is_held_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    }
    void unlock() { is_held_.store(false, std::memory_order_release); }

  private:
    std::atomic<bool> is_held_{false};
};

}  // namespace emulator
