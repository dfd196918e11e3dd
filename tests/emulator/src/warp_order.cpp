// Connects a warp with the race detector, and writes the messages for races.
#include <sstream>

#include "cluster.h"
#include "races.h"

namespace emulator {

uint32_t Warp::number() const {
    return cta.rank * static_cast<uint32_t>(cta.warps().size()) + static_cast<uint32_t>(index_);
}

// After lanes have diverged or reconverged, a new interval begins in which they are in step.
Lanes Warp::acting(uint32_t mask) {
    if (path_.in_step != path_.mask) {
        path_.in_step = path_.mask;
        path_.in_step_since = cta.cluster.order->advance(number());
    }
    return {number(), mask, path_.in_step, path_.in_step_since};
}

void Warp::touch(const Located& at, int bytes, int lane, bool is_write, const std::byte* value) {
    if (is_write && at.space == Space::kGlobal && cta.launch.write_log != nullptr) log_write(at.address);
    HappensBefore* const order = cta.cluster.order.get();
    if (order == nullptr) return;
    const Operation& operation = cta.launch.program->operations[path_.pc];
    const bool is_silent = value != nullptr && cta.launch.replicated_stores && std::memcmp(at.host, value, bytes) == 0;
    const HappensBefore::Touch touch{operation_number(), is_write,  operation.order != Order::kWeak,
                                     operation.scope,    is_silent, operation.is_sum && cta.launch.ordered_sums};
    if (at.space == Space::kShared) {
        order->touch_shared(acting(1u << lane), touch, at.owner->rank, at.address, bytes);
    } else if (at.space == Space::kGlobal) {
        order->touch_global(acting(1u << lane), touch, at.address, bytes);
    }
}

// Logs one write for each instruction: the cluster's clock is the same for all of its lanes.
void Warp::log_write(uint64_t address) {
    if (std::exchange(logged_at_, cta.cluster.clock) == cta.cluster.clock) return;
    WriteLog& log = *cta.launch.write_log;
    const uint32_t (&grid)[3] = cta.launch.grid;
    const int line = cta.launch.program->operations[path_.pc].instruction->line;
    const std::lock_guard lock(log.mutex);
    log.writes.push_back({(cta.index[2] * grid[1] + cta.index[1]) * grid[0] + cta.index[0], line, address});
}

namespace {

// Returns a key for the address of a strong access; in shared memory it includes the CTA's rank.
uint64_t location_of(const Located& at) {
    return at.space == Space::kShared ? uint64_t{at.owner->rank} << 32 | at.address : at.address;
}

}  // namespace

void Warp::release(const Located& at, int lane, bool is_atomic) {
    HappensBefore* const order = cta.cluster.order.get();
    if (order == nullptr || (at.space != Space::kShared && at.space != Space::kGlobal)) return;
    const Operation& operation = cta.launch.program->operations[path_.pc];
    order->write(acting(1u << lane), at.space == Space::kShared, location_of(at), operation.order, operation.scope,
                 is_atomic);
}

void Warp::acquire(const Located& at, int lane) {
    HappensBefore* const order = cta.cluster.order.get();
    if (order == nullptr || (at.space != Space::kShared && at.space != Space::kGlobal)) return;
    const Operation& operation = cta.launch.program->operations[path_.pc];
    order->read(acting(1u << lane), at.space == Space::kShared, location_of(at), operation.order, operation.scope);
}

// Reports a cp.async to the race detector: one operation with a read of global and a write of shared memory per lane.
void Warp::follow(const AsyncCopy& copy) {
    HappensBefore& order = *cta.cluster.order;
    UnorderedCopy followed{order.start(Proxy::kGeneric), copy.mask, copy.serial, {}};
    std::copy(copy.group, copy.group + kWarpSize, followed.group.begin());
    each_lane(copy.mask, [&](int lane) {
        HappensBefore::Touch touch{operation_number(), false};
        const Lanes by = acting(1u << lane);
        if (copy.source_bytes[lane] != 0) {
            order.touch_global(followed.id, by, touch, copy.global[lane], copy.source_bytes[lane]);
        }
        touch.is_write = true;
        order.touch_shared(followed.id, by, touch, cta.rank, copy.shared[lane], copy.bytes);
    });
    unordered_copies_.push_back(followed);
}

void Warp::order_copies(uint32_t mask, uint32_t most_pending) {
    size_t kept = 0;
    for (UnorderedCopy& copy : unordered_copies_) {
        uint32_t done = 0;
        each_lane(mask & copy.lanes, [&](int lane) {
            if (copy.group[lane] + uint64_t{most_pending} < committed_[lane]) done |= 1u << lane;
        });
        if (done != 0) cta.cluster.order->complete_own_parts(copy.id, acting(done));
        copy.lanes &= ~done;
        if (copy.lanes != 0) unordered_copies_[kept++] = copy;
    }
    unordered_copies_.resize(kept);
}

// Makes a lane's first `count` copies count for the current phase of an mbarrier. The lane may also wait for their
// group, so that a copy stays recorded until this warp knows that it is complete.
void Warp::order_first_copies(int lane, uint64_t count, const Cta& owner, const Mbarrier& mbarrier) {
    size_t kept = 0;
    for (UnorderedCopy& copy : unordered_copies_) {
        if (cta.cluster.order->is_known_complete(copy.id, number(), copy.lanes)) continue;
        const uint32_t part = copy.lanes & 1u << lane;
        if (part != 0 && copy.serial < count) {
            cta.cluster.order->complete_into_mbarrier(copy.id, owner.rank, mbarrier.offset, part);
        }
        unordered_copies_[kept++] = copy;
    }
    unordered_copies_.resize(kept);
}

namespace {

std::string describe(const Launch& launch, const Record& record) {
    if (record.cluster == kPredecessor.cluster) {
        return "a " + std::string(record.has(Record::kWrite) ? "write" : "read") + " by " +
               launch.history->predecessor() +
               ", the launch before, which may still run: griddepcontrol.wait waits for it (PTX ISA, \"Parallel "
               "Synchronization and Communication Instructions: griddepcontrol\")";
    }
    const LaunchHistory::Origin origin = launch.history->origin(record);
    const ptx::Module& module = *launch.program->module;
    const ptx::Instruction& instruction = *launch.program->operations[record.operation()].instruction;
    const uint32_t linear = origin.warp * kWarpSize + static_cast<uint32_t>(record.lane());
    const uint32_t x = launch.block[0], y = launch.block[1];
    std::string line = module.line(instruction.line);
    line.erase(0, line.find_first_not_of(" \t"));
    std::ostringstream text;
    text << "the " << (record.has(Record::kAsync) ? "asynchronous " : "")
         << (record.has(Record::kWrite) ? "write" : "read") << " by warp " << origin.warp << " (thread " << linear % x
         << ", " << linear / x % y << ", " << linear / x / y << ") of CTA (" << origin.cta[0] << ", " << origin.cta[1]
         << ", " << origin.cta[2] << ") at PTX line " << instruction.line << ": " << line;
    const auto file = module.files.find(instruction.source_file);
    if (file != module.files.end() && instruction.source_line > 0) {
        text << " (" << file->second << ":" << instruction.source_line << ")";
    }
    return text.str();
}

}  // namespace

Fault fault_of(const Launch& launch, const Conflict& conflict) {
    std::ostringstream text;
    if (conflict.kind == Conflict::Kind::kBeyondEnd) {
        text << "CTA " << (conflict.address >> 32) << " of the cluster has ended without waiting for "
             << describe(launch, conflict.earlier) << ", to byte " << static_cast<uint32_t>(conflict.address)
             << " of its shared memory";
        return Fault("cluster", text.str());
    }
    text << "this " << (conflict.later.has(Record::kAsync) ? "asynchronous " : "")
         << (conflict.later.has(Record::kWrite) ? "write" : "read") << " of ";
    if (conflict.is_shared) {
        text << "byte " << static_cast<uint32_t>(conflict.address) << " of shared memory";
        const LaunchHistory::Origin origin = launch.history->origin(conflict.later);
        if (conflict.address >> 32 != origin.rank) text << " of CTA " << (conflict.address >> 32) << " of the cluster";
    } else {
        text << launch.memory->name(conflict.address);
    }
    const bool needs_fence = conflict.kind == Conflict::Kind::kNeedsProxyFence;
    text << (needs_fence ? " by the async proxy comes after, but without a fence.proxy.async between, "
                         : " is not ordered with ")
         << describe(launch, conflict.earlier);
    if (needs_fence) text << " (PTX ISA, \"Async Proxy\")";
    if (conflict.kind == Conflict::Kind::kTooNarrow) {
        text << "; the mbarrier between them was arrived at or waited for with scope .cta, which does not include "
                "another "
                "CTA (PTX ISA, \"Morally Strong Operations\")";
    }
    if (conflict.kind == Conflict::Kind::kOpenSum) {
        text
            << "; both add floating numbers, and the order of the sum is not fixed: all that PTX promises is that each "
               "addition is whole (PTX ISA, \"Atomicity\")";
    }
    return Fault(needs_fence ? "proxy" : "race", text.str(), conflict.later.lane());
}

}  // namespace emulator
