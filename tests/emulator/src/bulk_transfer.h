// Copies by hardware between global and shared memory: what they have in common whatever describes the data. PTX ISA,
// "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "async_engine.h"
#include "machine.h"
#include "tensor_map.h"

namespace emulator {

// Bytes of a CTA's shared memory, in the order of the copy. A swizzle places each 16 of them.
struct SharedBox {
    Cta* owner;
    uint32_t offset;
    int64_t bytes;
    Swizzle swizzle = Swizzle::kNone;
};

// Faults where it leaves shared memory or touches an mbarrier object.
void check_box(const SharedBox& box, int lane);

// An mbarrier object that gets a complete-tx of these bytes.
struct Signal {
    Cta* owner;
    uint32_t offset;
    int64_t bytes;
};

// The CTA and the offset that a shared address names; `alignment` is required of it.
SharedBox shared_box(Warp& warp, Space space, uint64_t address, int64_t bytes, Swizzle swizzle, int alignment,
                     int lane);
// Likewise, and there must be an mbarrier object.
Signal signal_at(Warp& warp, Space space, uint64_t address, int64_t bytes, int lane);

using Bytes = std::vector<std::byte>;

// What a copy touches besides the shared memory that it is named after, for the race detector.
struct Reach {
    struct Run {
        uint64_t address, bytes;
    };
    std::vector<Run> global;
    std::vector<SharedBox> shared;
    Proxy proxy = Proxy::kAsync;
};

// Starts a copy into shared memory, one for each destination, which signals when its bytes are there. `fetch` reads
// the source, which is `from`, when the instruction is executed or when the first destination gets its bytes, by lot.
// Destinations are poison until then.
void start_fill(Warp& warp, const Operation& operation, int lane, const std::vector<SharedBox>& destinations,
                const std::vector<Signal>& signals, const Reach& from, std::function<Bytes()> fetch);

// Starts an update of shared memory of another CTA with what is read `from` somewhere: `update` gets the host's address
// of the destination.
void start_update(Warp& warp, const Operation& operation, int lane, const SharedBox& destination, const Signal& signal,
                  const Reach& from, std::function<void(std::byte*)> update);

// What a copy does where it ends; kSum: it adds floating numbers.
enum class Effect : uint8_t { kStore, kReduction, kSum };

// Starts a copy out of shared memory, as part of the lane's bulk group: the source is read at one moment, and `deliver`
// is called with what was there at a later one, and writes `to` there, atomically if it reduces.
void start_drain(Warp& warp, const Operation& operation, int lane, const SharedBox& source, const Reach& to,
                 Effect effect, std::function<void(const Bytes&)> deliver);

// Reads shared memory as the copy does: an error where its CTA has ended, or on request where nothing wrote it.
Bytes read_box(const SharedBox& box);

// For the counters: a run of global memory that one copy touches.
void count_global(Warp& warp, const Operation& operation, uint64_t address, int64_t bytes);

}  // namespace emulator
