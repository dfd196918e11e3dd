// The machinery that all asynchronous copies between global and shared memory use, bulk and tensor copies alike. PTX
// ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "async_engine.h"
#include "machine.h"
#include "tensor_map.h"

namespace emulator {

// A range of a CTA's shared memory in the order of the copy. The swizzle permutes its 16-byte chunks.
struct SharedBox {
    Cta* owner;
    uint32_t offset;
    int64_t bytes;
    Swizzle swizzle = Swizzle::kNone;
};

// Throws a Fault if the box leaves shared memory or touches an mbarrier object.
void check_box(const SharedBox& box, int lane);

// An mbarrier object that receives a complete-tx of `bytes`.
struct Signal {
    Cta* owner;
    uint32_t offset;
    int64_t bytes;
};

// Resolves a shared address to a box. Throws a Fault if the address is not a multiple of `alignment`.
SharedBox shared_box(Warp& warp, Space space, uint64_t address, int64_t bytes, Swizzle swizzle, int alignment,
                     int lane);
// Resolves a shared address to an mbarrier object. Throws a Fault if there is none.
Signal signal_at(Warp& warp, Space space, uint64_t address, int64_t bytes, int lane);

using Bytes = std::vector<std::byte>;

// The other side of a copy, for the race detector: the source of a fill or an update, the destination of a drain.
struct Reach {
    struct Run {
        uint64_t address, bytes;
    };
    std::vector<Run> global;
    std::vector<SharedBox> shared;
    Proxy proxy = Proxy::kAsync;
};

// Starts one copy into shared memory for each destination. Each signals its mbarrier when its bytes have arrived; until
// then the destination is poisoned. `fetch` reads the source `from`, either when the instruction executes or when the
// first destination gets its bytes, at random.
void start_fill(Warp& warp, const Operation& operation, int lane, const std::vector<SharedBox>& destinations,
                const std::vector<Signal>& signals, const Reach& from, std::function<Bytes()> fetch);

// Starts a reduction from the source `from` into another CTA's shared memory. `update` gets the destination's host
// address, and carries it out.
void start_update(Warp& warp, const Operation& operation, int lane, const SharedBox& destination, const Signal& signal,
                  const Reach& from, std::function<void(std::byte*)> update);

// What a copy does at its destination. kSum: it adds floating-point numbers.
enum class Effect : uint8_t { kStore, kReduction, kSum };

// Starts a copy out of shared memory, in the lane's bulk group. The source is read at one moment. At a later one,
// `deliver` gets the data and writes it to the destination `to`, atomically if it reduces.
void start_drain(Warp& warp, const Operation& operation, int lane, const SharedBox& source, const Reach& to,
                 Effect effect, std::function<void(const Bytes&)> deliver);

// Reads a box. Throws a Fault if its CTA has ended, or with option `uninitialised` if nothing has written some byte.
Bytes read_box(const SharedBox& box);

// Adds a contiguous range of global memory that a copy touches to the instruction's counters.
void count_global(Warp& warp, const Operation& operation, uint64_t address, int64_t bytes);

}  // namespace emulator
