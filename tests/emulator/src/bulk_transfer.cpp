#include "bulk_transfer.h"

#include <memory>
#include <optional>
#include <utility>

#include "cluster.h"

namespace emulator {
namespace {

// Calls function(offset in shared memory, offset in the copy, bytes) for each contiguous range of the box.
template <typename Function>
void each_piece(const SharedBox& box, Function&& function) {
    if (box.swizzle == Swizzle::kNone) return function(box.offset, int64_t{0}, box.bytes);
    for (int64_t at = 0; at < box.bytes; at += 16) {
        function(swizzled(box.swizzle, static_cast<uint32_t>(box.offset + at)), at, int64_t{16});
    }
}

[[noreturn]] void fail_ended(const SharedBox& box, const char* what) {
    throw Fault("cluster", "an asynchronous copy " + std::string(what) + " the shared memory of CTA " +
                               std::to_string(box.owner->rank) +
                               " of the cluster, which has ended without waiting for it");
}

void write_box(const SharedBox& box, const Bytes& bytes) {
    if (box.owner->has_ended()) fail_ended(box, "writes");
    check_box(box, -1);  // an mbarrier object may have been created there since the copy started
    each_piece(box, [&](uint32_t offset, int64_t at, int64_t count) {
        std::memcpy(box.owner->shared(offset, static_cast<int>(count)), bytes.data() + at, count);
        box.owner->mark_written(offset, static_cast<int>(count));
    });
}

void poison_box(const SharedBox& box) {
    each_piece(box, [&](uint32_t offset, int64_t, int64_t count) {
        std::memset(box.owner->shared(offset, static_cast<int>(count)), 0xff, count);
        box.owner->mark_unwritten(offset, static_cast<int>(count));
    });
}

void complete(const Signal& signal) {
    Mbarrier& mbarrier = signal.owner->mbarrier(signal.offset, -1);
    signal.owner->complete_transactions(mbarrier, signal.bytes, -1);
}

HappensBefore::Touch touch_of(const Warp& warp, bool is_write, bool is_atomic) {
    return {warp.operation_number(), is_write, is_atomic, Scope::kGpu};
}

void touch_box(HappensBefore& order, AsyncId id, const Lanes& by, const HappensBefore::Touch& touch,
               const SharedBox& box) {
    each_piece(box, [&](uint32_t offset, int64_t, int64_t count) {
        order.touch_shared(id, by, touch, box.owner->rank, offset, count);
    });
}

void touch_reach(HappensBefore& order, AsyncId id, const Lanes& by, const HappensBefore::Touch& touch,
                 const Reach& reach) {
    for (const SharedBox& box : reach.shared) touch_box(order, id, by, touch, box);
    for (const Reach::Run& run : reach.global) order.touch_global(id, by, touch, run.address, run.bytes);
}

// Reports a copy into a box to the race detector. Returns a function to call before the mbarrier is signalled.
std::function<void()> follow(Warp& warp, int lane, const Reach& from, const SharedBox& to, const Signal& signal,
                             bool is_atomic) {
    HappensBefore* const order = warp.cta.cluster.order.get();
    if (order == nullptr) return [] {};
    const AsyncId id = order->start(from.proxy);
    const Lanes by = warp.acting(1u << lane);
    touch_reach(*order, id, by, touch_of(warp, false, false), from);
    touch_box(*order, id, by, touch_of(warp, true, is_atomic), to);
    return [order, id, signal] { order->complete_into_mbarrier(id, signal.owner->rank, signal.offset); };
}

}  // namespace

void check_box(const SharedBox& box, int lane) {
    each_piece(box, [&](uint32_t offset, int64_t, int64_t count) {
        if (box.owner->shared(offset, static_cast<int>(count)) == nullptr) {
            throw Fault("out-of-bounds",
                        "a copy of " + std::to_string(box.bytes) + " bytes at offset " + std::to_string(box.offset) +
                            " of shared memory, which ends at " + std::to_string(box.owner->shared_bytes()),
                        lane);
        }
        if (box.owner->touches_mbarrier(offset, static_cast<int>(count))) {
            throw Fault("mbarrier",
                        "a copy of " + std::to_string(box.bytes) + " bytes at offset " + std::to_string(box.offset) +
                            " of shared memory, where an mbarrier object is",
                        lane);
        }
    });
}

SharedBox shared_box(Warp& warp, Space space, uint64_t address, int64_t bytes, Swizzle swizzle, int alignment,
                     int lane) {
    Cta& owner = warp.shared_owner(space, address, lane);
    if (static_cast<uint64_t>(bytes) > kCtaBytes) {
        throw Fault("out-of-bounds", "a copy of " + std::to_string(bytes) + " bytes, more than shared memory has",
                    lane);
    }
    if (address % alignment != 0) {
        throw Fault("misaligned",
                    "a copy at offset " + std::to_string(address) + " of shared memory, which is no multiple of " +
                        std::to_string(alignment),
                    lane);
    }
    const SharedBox box{&owner, static_cast<uint32_t>(address), bytes, swizzle};
    check_box(box, lane);
    return box;
}

Signal signal_at(Warp& warp, Space space, uint64_t address, int64_t bytes, int lane) {
    Cta& owner = warp.shared_owner(space, address, lane);
    owner.mbarrier(address, lane);
    return {&owner, static_cast<uint32_t>(address), bytes};
}

void start_fill(Warp& warp, const Operation& operation, int lane, const std::vector<SharedBox>& destinations,
                const std::vector<Signal>& signals, const Reach& from, std::function<Bytes()> fetch) {
    const auto data = std::make_shared<std::optional<Bytes>>();
    if (warp.cta.random.below(2) == 0) *data = fetch();
    for (const SharedBox& box : destinations) poison_box(box);
    for (size_t i = 0; i < destinations.size(); ++i) {
        warp.cta.cluster.async.start(warp, operation, lane, AsyncEngine::Latest::kUnbound,
                                     [box = destinations[i], signal = signals[i], data, fetch,
                                      is_complete = follow(warp, lane, from, destinations[i], signals[i], false)] {
                                         if (!*data) *data = fetch();
                                         write_box(box, **data);
                                         is_complete();
                                         complete(signal);
                                     });
    }
}

void start_update(Warp& warp, const Operation& operation, int lane, const SharedBox& destination, const Signal& signal,
                  const Reach& from, std::function<void(std::byte*)> update) {
    warp.cta.cluster.async.start(
        warp, operation, lane, AsyncEngine::Latest::kUnbound,
        [destination, signal, update = std::move(update),
         is_complete = follow(warp, lane, from, destination, signal, true)] {
            if (destination.owner->has_ended()) fail_ended(destination, "updates");
            update(destination.owner->shared(destination.offset, static_cast<int>(destination.bytes)));
            is_complete();
            complete(signal);
        });
}

void start_drain(Warp& warp, const Operation& operation, int lane, const SharedBox& source, const Reach& to,
                 Effect effect, std::function<void(const Bytes&)> deliver) {
    AsyncEngine& engine = warp.cta.cluster.async;
    const auto data = std::make_shared<Bytes>();
    const AsyncEngine::Handle read =
        engine.start(warp, operation, lane, AsyncEngine::Latest::kBound, [source, data] { *data = read_box(source); });
    const AsyncEngine::Handle write =
        engine.start(warp, operation, lane, AsyncEngine::Latest::kBound, [&engine, read, data, deliver] {
            engine.finish(read);
            deliver(*data);
        });
    AsyncId reading{}, writing{};
    if (HappensBefore* const order = warp.cta.cluster.order.get(); order != nullptr) {
        reading = order->start(Proxy::kAsync);
        writing = order->start(Proxy::kAsync);
        const Lanes by = warp.acting(1u << lane);
        touch_box(*order, reading, by, touch_of(warp, false, false), source);
        HappensBefore::Touch touch = touch_of(warp, true, effect != Effect::kStore);
        touch.is_sum = effect == Effect::kSum && warp.cta.launch.ordered_sums;
        touch_reach(*order, writing, by, touch, to);
    }
    warp.bulk_groups.add(lane, {read, write, reading, writing});
}

Bytes read_box(const SharedBox& box) {
    if (box.owner->has_ended()) fail_ended(box, "reads");
    Bytes bytes(box.bytes);
    each_piece(box, [&](uint32_t offset, int64_t at, int64_t count) {
        if (box.owner->launch.uninitialised && !box.owner->is_written(offset, static_cast<int>(count))) {
            throw Fault("uninitialised", "a copy reads shared memory at offset " + std::to_string(offset) +
                                             ", some of which nothing has written");
        }
        std::memcpy(bytes.data() + at, box.owner->shared(offset, static_cast<int>(count)), count);
    });
    return bytes;
}

void count_global(Warp& warp, const Operation& operation, uint64_t address, int64_t bytes) {
    if (bytes == 0) return;
    Counts& counts = warp.cta.report.operations[&operation - warp.cta.launch.program->operations.data()];
    counts.bytes += bytes;
    counts.sectors += (address + bytes - 1) / 32 - address / 32 + 1;
}

}  // namespace emulator
