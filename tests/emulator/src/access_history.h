// Records who touched each byte last: accesses, and the asynchronous operations that made some of them.
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

// The number of an asynchronous operation of the launch.
enum class AsyncId : uint32_t {};

// An access to bytes of a cell by lanes of a warp, in one instruction or asynchronous operation.
struct Record {
    enum Flags : uint32_t {
        kWrite = 1,
        kStrong = 2,
        kScope = 4 | 8,  // the scope of a strong access; of an asynchronous one, the scope of its completion
        kAsync = 16,
        kAsyncProxy = 32,
        kSilent = 64,  // a write of the value that was there already
        kSum = 128,    // an addition of floating-point numbers whose order should be fixed
    };
    static constexpr int kScopeShift = 2, kOperationShift = 8;

    uint32_t clock;  // the warp's time; for an asynchronous operation its AsyncId
    uint32_t place;  // the program's operation << kOperationShift | flags
    uint32_t cluster;
    uint32_t lanes;
    uint16_t warp;   // in the cluster
    uint16_t bytes;  // mask of the cell's bytes

    bool has(uint32_t flags) const { return (place & flags) != 0; }
    int scope() const { return static_cast<int>(place & kScope) >> kScopeShift; }
    int lane() const { return __builtin_ctz(lanes); }
    uint32_t operation() const { return place >> kOperationShift; }
    bool is_by_same_instruction(const Record& other) const {
        return clock == other.clock && place == other.place && warp == other.warp && cluster == other.cluster;
    }
};
constexpr uint32_t kMostRecordedOperations = 1u << (32 - Record::kOperationShift);

// The records of 16 bytes of memory. The cell itself has room for the first kFew of them.
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

// Two accesses to the same bytes that are an error.
struct Conflict {
    enum class Kind : uint8_t {
        kUnordered,
        kTooNarrow,  // ordered only by an mbarrier's arrival or wait of scope .cta between CTAs
        kOpenSum,    // two unordered additions of floating-point numbers whose order should be fixed
        kNeedsProxyFence,
        kBeyondEnd,  // an access not ordered before the end of the CTA that owns the memory; `later` equals `earlier`
    };
    Kind kind;
    Record earlier, later;
    bool is_shared;
    uint64_t address;  // of the first byte that both touch; in shared memory: the CTA's rank << 32 | offset
};

// A proof that an asynchronous operation has happened: whoever knows that `agent` (an mbarrier, or a warp whose lanes
// have waited) has reached `clock` knows it. An operation may have several completions.
struct Completion {
    Agent agent;
    uint32_t clock;
    uint32_t lanes;    // the lanes whose parts of the operation it covers
    uint32_t waiters;  // the lanes that have waited; 0: each lane has waited for its own part
    const Completion* next;
};

// The asynchronous operations of a launch. They live as long as the records, and all threads of the host share them.
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
    uint32_t take_chunk();  // returns the first of kChunk numbers, which then belong to the caller
    static constexpr uint32_t kChunk = 128;

    // Keeps the completions alive until the end of the launch.
    void keep(std::deque<Completion>&& completions);

  private:
    static constexpr uint32_t kMostChunks = 1u << 20;
    std::atomic<Operation*>* chunks_;
    std::atomic<uint32_t> num_chunks_{0};
    std::mutex mutex_;
    std::deque<std::deque<Completion>> kept_;
};

// A lock for critical sections of a few instructions. Waiters yield, because the holder may have been descheduled.
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
