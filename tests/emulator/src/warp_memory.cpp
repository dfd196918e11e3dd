// A warp's memory accesses: checks, counters, and cp.async.
#include <algorithm>
#include <array>
#include <sstream>

#include "cluster.h"

namespace emulator {
namespace {

constexpr const char* kSpaceNames[] = {"generic", "global", "shared", "local", "constant", "parameter", "cluster"};

std::string hex(uint64_t value) {
    std::ostringstream text;
    text << std::hex << value;
    return text.str();
}

Space resolve(Space space, uint64_t& address) {
    if (space != Space::kGeneric) return space;
    const uint64_t window = address & ~(kWindowBytes - 1);
    const Space found = window == kSharedWindow  ? Space::kCluster
                        : window == kLocalWindow ? Space::kLocal
                        : window == kParamWindow ? Space::kParam
                                                 : Space::kGlobal;
    if (found != Space::kGlobal) address -= window;
    return found;
}

}  // namespace

Located Warp::locate(Space space, uint64_t address, int bytes, int lane, bool is_write) {
    space = resolve(space, address);
    if ((address & (bytes - 1)) != 0) {
        std::ostringstream text;
        text << "a " << kSpaceNames[static_cast<int>(space)] << " access of " << bytes << " bytes at 0x" << std::hex
             << address << ", which is no multiple of its size";
        throw Fault("misaligned", text.str(), lane);
    }
    switch (space) {
        case Space::kShared:
        case Space::kCluster: {
            Cta& owner = shared_owner(space, address, lane);
            std::byte* host = owner.shared(address, bytes);
            if (host == nullptr) fail_access(space, address, bytes, lane, is_write);
            if (owner.touches_mbarrier(address, bytes)) {
                throw Fault("mbarrier",
                            "an access of " + std::to_string(bytes) + " bytes at offset " + std::to_string(address) +
                                " of shared memory, where an mbarrier object is",
                            lane);
            }
            if (is_write) {
                owner.mark_written(address, bytes);
            } else if (cta.launch.uninitialised && !owner.is_written(address, bytes)) {
                throw Fault("uninitialised",
                            "a read of " + std::to_string(bytes) + " bytes of shared memory at offset " +
                                std::to_string(address) + ", some of which nothing has written",
                            lane);
            }
            return {host, Space::kShared, &owner, address};
        }
        case Space::kLocal:
            if (!is_inside(address, bytes, local_[lane].size())) fail_access(space, address, bytes, lane, is_write);
            return {local_[lane].data() + address, space, nullptr, address};
        case Space::kParam:
            if (is_write || !is_inside(address, bytes, cta.launch.parameters.size())) {
                fail_access(space, address, bytes, lane, is_write);
            }
            return {const_cast<std::byte*>(cta.launch.parameters.data()) + address, space, nullptr, address};
        default:
            return {global(address, bytes, lane, is_write), space, nullptr, address};
    }
}

std::byte* Warp::global(uint64_t address, uint64_t bytes, int lane, bool is_write) {
    const GlobalMemory::Region& last = cta.last_region;
    if (cta.launch.checks && (address < last.begin || !is_inside(address, bytes, last.end))) {
        const GlobalMemory::Region region = cta.launch.memory->find(address, bytes);
        if (region.end == 0) fail_access(Space::kGlobal, address, static_cast<int>(bytes), lane, is_write);
        cta.last_region = region;
    }
    return reinterpret_cast<std::byte*>(address);
}

Cta& Warp::shared_owner(Space space, uint64_t& address, int lane) {
    if (space == Space::kGeneric) {
        space = resolve(space, address);
        if (space != Space::kCluster) {
            throw Fault("out-of-bounds", "an address of shared memory is needed, 0x" + hex(address) + " is none", lane);
        }
    }
    if (address < kCtaBytes) return cta;
    const uint64_t rank = address / kCtaBytes - 1;
    if (rank >= cta.cluster.num_ctas()) {
        throw Fault("out-of-bounds",
                    "an access at 0x" + hex(address) + " of shared memory: that is in no CTA of the cluster", lane);
    }
    if (space == Space::kShared && rank != cta.rank) {
        throw Fault("cluster",
                    "an address in the shared memory of CTA " + std::to_string(rank) +
                        " of the cluster in an instruction for .shared::cta",
                    lane);
    }
    Cta& owner = cta.cluster.cta(static_cast<uint32_t>(rank));
    if (owner.has_ended()) {
        throw Fault(
            "cluster",
            "an access to the shared memory of CTA " + std::to_string(rank) + " of the cluster, which has ended", lane);
    }
    address %= kCtaBytes;
    return owner;
}

void Warp::fail_access(Space space, uint64_t address, int bytes, int lane, bool is_write) {
    const std::string what = is_write ? "a write of " : "a read of ";
    if (space == Space::kGlobal || space == Space::kConst) {
        throw Fault("out-of-bounds", what + cta.launch.memory->describe(address, bytes), lane);
    }
    const size_t size = space == Space::kShared || space == Space::kCluster ? cta.shared_bytes()
                        : space == Space::kLocal                            ? local_[lane].size()
                                                                            : cta.launch.parameters.size();
    std::ostringstream text;
    text << what << bytes << " bytes at offset " << address << " of " << kSpaceNames[static_cast<int>(space)]
         << " memory, which ends at " << size;
    throw Fault("out-of-bounds", text.str(), lane);
}

// Shared memory serves a request in wavefronts of at most one 4-byte word from each of 32 banks. Lanes that access the
// same word share it. A request of 8 or 16 bytes per lane is served in two half warps or four quarter warps.
void Warp::count_memory(const Operation& operation, Space space, const uint64_t* addresses, int bytes, uint32_t mask) {
    Counts& counts = cta.report.operations[&operation - cta.launch.program->operations.data()];
    uint64_t first = addresses[__builtin_ctz(mask)];
    space = resolve(space, first);
    if (space == Space::kShared || space == Space::kCluster) {
        const int words = std::max(1, bytes / 4), lanes_at_once = kWarpSize / words;
        for (int start = 0; start < kWarpSize; start += lanes_at_once) {
            std::array<std::array<uint32_t, kWarpSize>, 32> wanted;
            std::array<int, 32> num_wanted{};
            int worst = 0;
            for (int lane = start; lane < start + lanes_at_once; ++lane) {
                if ((mask >> lane & 1) == 0) continue;
                for (int i = 0; i < words; ++i) {
                    const uint32_t word = static_cast<uint32_t>(addresses[lane] / 4) + i, bank = word % 32;
                    auto* const end = wanted[bank].begin() + num_wanted[bank];
                    if (std::find(wanted[bank].begin(), end, word) != end) continue;
                    *end = word;
                    worst = std::max(worst, ++num_wanted[bank]);
                }
            }
            counts.wavefronts += worst;
            counts.conflicts += worst > 0 ? worst - 1 : 0;
        }
    } else if (space == Space::kGlobal) {
        std::array<uint64_t, 2 * kWarpSize> sectors;
        int count = 0;
        each_lane(mask, [&](int lane) {
            sectors[count++] = addresses[lane] / 32;
            const uint64_t last = (addresses[lane] + bytes - 1) / 32;
            if (last != sectors[count - 1]) sectors[count++] = last;
        });
        std::sort(sectors.begin(), sectors.begin() + count);
        counts.sectors += std::unique(sectors.begin(), sectors.begin() + count) - sectors.begin();
        counts.bytes += static_cast<uint64_t>(bytes) * __builtin_popcount(mask);
    }
}

// A copy lands at once, when it is waited for, or at a random moment between. Until then its destination is poisoned,
// which reveals an instruction that reads it too early.
void Warp::start_copy(const AsyncCopy& copy) {
    const uint32_t fate = cta.random.below(4);
    copies_.push_back(copy);
    AsyncCopy& started = copies_.back();
    started.serial = num_copies_++;
    std::copy(committed_, committed_ + kWarpSize, started.group);
    if (cta.cluster.order) follow(started);
    if (fate == 0) {
        land(started, started.mask);
        copies_.pop_back();
        return;
    }
    each_lane(started.mask, [&](int lane) {
        std::memset(cta.shared(started.shared[lane], started.bytes), 0xff, started.bytes);
        cta.mark_unwritten(started.shared[lane], started.bytes);
    });
    started.due = fate == 1 ? INT64_MAX : cta.cluster.clock + cta.random.length(11);
    next_due_ = std::min(next_due_, started.due);
}

void Warp::land(const AsyncCopy& copy, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        std::byte* to = cta.shared(copy.shared[lane], copy.bytes);
        std::memcpy(to, reinterpret_cast<const void*>(copy.global[lane]), copy.source_bytes[lane]);
        std::memset(to + copy.source_bytes[lane], 0, copy.bytes - copy.source_bytes[lane]);
        cta.mark_written(copy.shared[lane], copy.bytes);
    });
}

void Warp::land_due_copies() {
    next_due_ = INT64_MAX;
    for (size_t i = 0; i < copies_.size();) {
        if (copies_[i].due <= cta.cluster.clock) {
            land(copies_[i], copies_[i].mask);
            copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
            next_due_ = std::min(next_due_, copies_[i++].due);
        }
    }
}

void Warp::commit_group(uint32_t mask) {
    each_lane(mask, [&](int lane) { ++committed_[lane]; });
}

// Lands the part of each copy and each of these lanes for which is_done(copy, lane) is true.
template <typename Predicate>
void Warp::land_copies(uint32_t mask, Predicate&& is_done) {
    for (size_t i = 0; i < copies_.size();) {
        AsyncCopy& copy = copies_[i];
        uint32_t done = 0;
        each_lane(mask & copy.mask, [&](int lane) { done |= is_done(copy, lane) ? 1u << lane : 0; });
        land(copy, done);
        copy.mask &= ~done;
        if (copy.mask == 0) {
            copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
            ++i;
        }
    }
}

void Warp::wait_group(uint32_t mask, uint32_t most_pending) {
    land_copies(mask, [&](const AsyncCopy& copy, int lane) {
        return copy.group[lane] + uint64_t{most_pending} < committed_[lane];
    });
    order_copies(mask, most_pending);
}

void Warp::land_first_copies(uint32_t mask, uint64_t count) {
    land_copies(mask, [&](const AsyncCopy& copy, int) { return copy.serial < count; });
}

}  // namespace emulator
