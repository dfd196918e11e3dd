// Which access happens before which, and who touched each byte last: finds conflicting accesses that nothing orders.
//
// The agents are the lanes of warps, asynchronous operations and mbarriers. Each warp has a vector clock: of every
// other agent, up to where it is known to have happened before. What lanes release carries this clock, and what
// acquires it takes it over:
//
//   bar.warp.sync          the lanes that meet release and acquire; likewise wgmma.wait_group: more than PTX says
//   bar, barrier.cta       an arrival releases, a wait acquires; a warp's exit releases to barriers for all threads
//   barrier.cluster        arrive.release (not .relaxed) and wait.acquire
//   mbarrier               an arrival releases and a successful wait acquires, a relaxed one after or before a fence:
//                          in the CTA that arrives, and in others where the scope of both is .cluster
//   st.release, atom, red  with .release or .acq_rel, and relaxed (volatile) ones after a fence, to ld.acquire, atom with
//                          .acquire or .acq_rel, and relaxed (volatile) ones before a fence, of the same address, where
//                          the scopes of all include both sides. A fence before a CTA's barrier (or bar.warp.sync)
//                          serves an atomic of another thread after it, and likewise a fence after the barrier: more
//                          than PTX promises to, but what hardware does and programs rely on.
//   griddepcontrol.wait    acquires all that the launch before has done, where this one began without waiting for it
//
// Lanes share one clock and one history as long as they know the same. What only some of a warp's lanes have acquired
// is kept beside the warp's clock until they meet the others; and what only some of them release covers their own
// accesses, but those of the other lanes only up to where they last met. Nothing else orders lanes: neither where paths
// meet again nor shuffles and votes. Only of lanes that execute in step, as one path that has not parted, the accesses
// to each other's data are let pass: they do not become known by that, to other warps or to asynchronous operations.
//
// An asynchronous operation begins with what its issuer knows, and is ordered with nobody else: neither with what its
// issuer does next, nor with other operations. It is known to have happened by those who waited for it (`complete`).
//
// Between CTAs, an arrival or a wait of scope .cta hands nothing over that was written. It only tells that what came
// before is over: reads, which may then be written over, the writes of bulk copies, whose completion has cluster scope,
// and what threads have written in shared memory and shown by a proxy fence, which a bulk copy may then write over. The
// pipelines of CUTLASS free the stages of a ring that way.
//
// Proxies: what the generic proxy wrote and the async proxy touches next needs a fence.proxy.async between, anywhere on
// the way from one to the other: PTX speaks of a fence along the causality path, and does not say whose. What it only
// read needs none before the async proxy writes over it, but with `strict_proxy_reads`: the thread that lets it happen
// has the value already, and pipelines rely on it. The other direction needs no fence either, because the completion of
// an operation of the async proxy implies it.
//
// Everything here is called at the moment when the instruction executes, also for the accesses of asynchronous
// operations, whenever these are performed.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "access_history.h"
#include "fault.h"
#include "program.h"
#include "vector_clock.h"

namespace emulator {

// What lanes know, and how much of this a fence.proxy.async has shown to the async proxy, by state space.
struct Past {
    VectorClock known, visible_shared, visible_global;
    VectorClock over;          // more than what is known, but what was written may not be there to be read
    VectorClock over_visible;  // the part of it whose reads a fence has shown to the async proxy, in shared memory
    void join(const Past& from) {
        known.join(from.known), over.join(from.over);
        join_visible(from);
    }
    void join_over(const Past& from) {
        over.join(from.known), over.join(from.over);
        join_visible(from);
    }
    void clear() { known.clear(), visible_shared.clear(), visible_global.clear(), over.clear(), over_visible.clear(); }

  private:
    void join_visible(const Past& from) {
        visible_shared.join(from.visible_shared), visible_global.join(from.visible_global);
        over_visible.join(from.over_visible);
    }
};

constexpr int kNumScopes = 3;

struct Knowledge {
    Past past;
    Past fenced[kNumScopes];    // at the last fence of that scope at least: what relaxed writes release
    Past observed[kNumScopes];  // what relaxed reads have seen: a fence of that scope at least acquires it
    void join(const Knowledge& from);
};

// Lanes of a warp that execute an instruction. `warp` is rank * (warps of a CTA) + index.
struct Lanes {
    uint32_t warp, mask;
    uint32_t in_step = 0;                 // lanes that have executed the same instructions with them …
    uint32_t in_step_since = UINT32_MAX;  // … since this time of the warp
};

// A page has the records of that much global memory.
struct Page {
    static constexpr uint64_t kBytes = 4096;
    Cell cells[kBytes / Cell::kBytes];
};

// What a launch has touched of global memory, for one that begins before it has ended (programmatic dependent launch).
struct PastAccesses {
    std::string kernel;
    std::vector<std::pair<uint64_t, std::unique_ptr<Page>>> pages;
    bool are_last;  // false: where this launch let the next one begin, the one before it may not have ended
};

// This agent stands for the launch before, also in the records of this one.
constexpr Agent kPredecessor{~uint32_t{0}, 0};

// What all clusters of a launch share. Its members may be used by several threads of the host.
class LaunchHistory {
  public:
    // `fault` makes an error of a conflict. `strict_proxy_reads`: see the top.
    LaunchHistory(std::function<Fault(const Conflict&)> fault, bool strict_proxy_reads)
        : fault(std::move(fault)), strict_proxy_reads(strict_proxy_reads) {}

    // This launch begins without waiting for the one before, whose records it takes over.
    void follow(PastAccesses&& before);
    const std::string& predecessor() const { return predecessor_; }  // empty: there is none
    // Gives them away at the end of a launch; nullptr: there are more of them than are kept.
    std::shared_ptr<PastAccesses> take_accesses(const std::string& kernel);

    // The CTA indices of a cluster's CTAs, for messages; gives its number.
    uint32_t add_cluster(std::vector<std::array<uint32_t, 3>> ctas, uint32_t warps_per_cta);
    struct Origin {
        std::array<uint32_t, 3> cta;
        uint32_t rank;  // of the CTA in the cluster
        uint32_t warp;  // of the CTA
    };
    Origin origin(const Record& record) const;
    const std::function<Fault(const Conflict&)> fault;
    const bool strict_proxy_reads;

  private:
    friend class HappensBefore;

    // Releases to an address, by the scope that an acquirer has to be within.
    struct Release {
        Message known, visible_shared, visible_global, over, over_visible;
        uint64_t owner = 0;
    };
    struct Location {
        Release releases[kNumScopes];
        uint64_t last_writer = ~uint64_t{0};
    };
    struct Shard {
        SpinLock lock;
        std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
        std::unordered_map<uint64_t, Location> locations;
    };
    static constexpr uint32_t kNumShards = 64;
    Shard& shard(uint64_t page) { return shards_[page * 0x9e3779b97f4a7c15 >> 58]; }

    Shard shards_[kNumShards];
    std::atomic<bool> has_locations_{false};
    std::string predecessor_;
    std::atomic<bool> has_waited_{false},
        lets_begin_early_{false};  // for the predecessor; the next launch before it ended
    AsyncOperations operations_;
    mutable std::mutex mutex_;
    struct ClusterPlace {
        std::vector<std::array<uint32_t, 3>> ctas;
        uint32_t warps_per_cta;
    };
    std::deque<ClusterPlace> clusters_;
};

// Of one cluster. A Fault is thrown where two accesses are not ordered.
class HappensBefore {
  public:
    // `lanes`: those that each warp of a CTA has.
    HappensBefore(LaunchHistory& history, std::vector<std::array<uint32_t, 3>> ctas, const std::vector<uint32_t>& lanes,
                  int64_t shared_bytes);
    ~HappensBefore();

    // How an instruction, or the operation that it starts, touches memory.
    struct Touch {
        uint32_t operation;  // of the program
        bool is_write;
        bool is_strong = false;  // atomic, volatile, relaxed, …: not a race with another such
        Scope scope = Scope::kCta;
        bool is_silent = false;  // writes what is there already: not a race with a write by the same instruction
        bool is_sum = false;     // a race with another such, though both are strong
    };
    void touch_shared(const Lanes& by, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(by, touch), by, rank, offset, bytes);
    }
    void touch_global(const Lanes& by, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(by, touch), by, address, bytes);
    }

    // An asynchronous operation that starts now, then what it touches (it knows what any of the lanes that start it
    // knows), and how others come to know of it. What an instruction does that completes in parts (the source is read,
    // the destination is written) is several operations.
    AsyncId start(Proxy proxy);
    void touch_shared(AsyncId id, const Lanes& by, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(id, by, touch), by, rank, offset, bytes);
    }
    void touch_global(AsyncId id, const Lanes& by, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(id, by, touch), by, address, bytes);
    }
    // Each of these lanes has waited for it, or for its own part of it: that has happened before what it does next.
    void complete(AsyncId id, const Lanes& who) { add_completion(id, who.warp, time(who.warp), kAllLanes, who.mask); }
    void complete_own_parts(AsyncId id, const Lanes& who) { add_completion(id, who.warp, time(who.warp), who.mask, 0); }
    // All lanes of the warp know so of these lanes' parts.
    bool is_known_complete(AsyncId id, uint32_t warp, uint32_t lanes) const;
    // It counts for the current phase of this mbarrier: to be called before that phase completes.
    void complete_into_mbarrier(AsyncId id, uint32_t rank, uint64_t offset, uint32_t lanes = kAllLanes);

    // mbarrier objects, by the CTA's rank and the offset in its shared memory.
    void init_mbarrier(uint32_t rank, uint64_t offset);
    void arrive_at_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool releases, Scope scope);
    void complete_phase(uint32_t rank, uint64_t offset);
    // Its phase was complete.
    void wait_for_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool acquires, Scope scope);

    // bar.warp.sync.
    void synchronise(const Lanes& who);

    // Barriers of a CTA: everybody arrives; those who wait leave when it is complete; then it is reset.
    void arrive_at_barrier(const Lanes& who, int id);
    void leave_barrier(const Lanes& who, int id, bool is_for_all);
    void reset_barrier(uint32_t rank, int id) { barriers_[rank * kNumBarriers + id] = {}; }
    void exit(const Lanes& who);
    // All warps of the CTA have: what others do with its shared memory, and asynchronous copies of its own, must have
    // happened before. Here a barrier.cluster with .relaxed is enough.
    void end(uint32_t rank);

    void arrive_at_cluster(const Lanes& who, bool releases = true);
    void complete_cluster();
    void leave_cluster(const Lanes& who);

    void fence(const Lanes& who, Scope scope, bool acquires = true, bool releases = true);
    // other_ctas: also of the shared memory of the cluster's other CTAs.
    void fence_proxy(const Lanes& who, bool shared, bool other_ctas, bool global);

    // What the warp does from now on is of a new time.
    uint32_t advance(uint32_t warp) { return ++warps_[warp].time; }

    // griddepcontrol
    void wait_for_predecessor(const Lanes& who);
    void launch_dependents(const Lanes& who);

    // Of each lane with a strong access. `write` before memory is written, `read` after memory has been read.
    void write(const Lanes& who, bool is_shared, uint64_t address, Order order, Scope scope, bool is_atomic);
    void read(const Lanes& who, bool is_shared, uint64_t address, Order order, Scope scope);

  private:
    static constexpr int kNumBarriers = 16;
    struct Arrivals {
        std::vector<Knowledge> by_cta;  // what the warps of each CTA have released
        Knowledge wide;                 // what was released at cluster scope
    };
    struct MbarrierAgent {
        uint32_t component;
        uint32_t phase = 0;  // phases that have completed
        Arrivals pending, completed;
    };
    struct Warp {
        uint32_t lanes, live;
        uint32_t time = 1;                    // changes where some of what it has done may become known
        uint32_t fenced_at[kNumScopes] = {};  // when all of its lanes last were at a fence of that scope at least
        Knowledge known;                      // to all of its lanes, also of each other
        struct Part {
            uint32_t lanes;
            Knowledge known;
        };
        std::vector<Part> parts;  // what only these lanes know
    };
    uint32_t time(uint32_t warp) const { return warps_[warp].time; }
    bool is_whole(const Lanes& who) const { return (warps_[who.warp].live & ~who.mask) == 0; }
    AsyncOperations::Operation& operation(AsyncId id) { return history_.operations_.at(id); }
    uint32_t rank_of(uint32_t warp) const { return warp / warps_per_cta_; }
    // The CTA or the cluster that a release at this scope is meant for; 0: all of the launch.
    uint64_t owner_of(Scope scope, uint32_t warp) const {
        if (scope == Scope::kGpu) return 0;
        return uint64_t{cluster_ + 1} << 32 | (scope == Scope::kCta ? rank_of(warp) : 0);
    }
    // Calls function(Knowledge) for all that any of these lanes knows.
    template <typename Function>
    void each_known(const Lanes& who, Function&& function) const;
    // That these lanes did until then, each for itself.
    void add_own(VectorClock& clock, const Lanes& who, uint32_t time) const;
    void release(Knowledge& into, const Lanes& who, bool releases = true, Scope scope = Scope::kCluster) const;
    void acquire(const Lanes& who, const Knowledge& from) { shared_by(who).join(from); }
    Knowledge& shared_by(const Lanes& who);
    void forget_parts(const Lanes& who);
    void touch(Cell& cell, Record now, const Lanes& by, bool is_shared, uint64_t address);
    void touch_shared(Record now, const Lanes& by, uint32_t rank, uint64_t offset, uint64_t bytes);
    void touch_global(Record now, const Lanes& by, uint64_t address, uint64_t bytes);
    // Which of an agent's lanes are not known to have come as far as this. An mbarrier has no lanes, but one will do.
    uint32_t unknown_in(const VectorClock& clock, Agent agent, uint32_t lanes, uint32_t time) const;
    uint32_t unknown_to(const Lanes& who, VectorClock Past::* clock, Agent agent, uint32_t lanes, uint32_t time) const;
    // Likewise of the lanes of a record, where unknown(agent, lanes, time) says so of what happened by a time.
    template <typename Function>
    uint32_t unknown_lanes(const Record& record, Function&& unknown) const;
    template <typename Function>
    uint32_t unknown_parts(AsyncId id, uint32_t lanes, Function&& unknown) const;
    bool are_morally_strong(const Record& a, const Record& b) const;
    Record record_of(const Lanes& by, const Touch& touch) const;
    Record record_of(AsyncId id, const Lanes& by, const Touch& touch);
    MbarrierAgent& mbarrier(uint32_t rank, uint64_t offset) {
        const auto [found, is_new] = mbarriers_.try_emplace(uint64_t{rank} << 32 | offset);
        if (is_new) reset(found->second);
        return found->second;
    }
    void reset(MbarrierAgent& agent);
    void add_completion(AsyncId id, uint32_t component, uint32_t time, uint32_t lanes, uint32_t waiters);
    template <typename Function>
    void at_location(bool is_shared, uint64_t address, bool creates, Function&& function);

    LaunchHistory& history_;
    const uint32_t warps_per_cta_;
    uint32_t cluster_;
    uint32_t num_components_;
    std::vector<Warp> warps_;
    std::vector<std::vector<Cell>> shared_;  // by CTA
    std::unordered_map<uint64_t, LaunchHistory::Location> shared_locations_;
    std::vector<Knowledge> barriers_;
    std::vector<Knowledge> exited_;  // by CTA
    Knowledge cluster_pending_, cluster_completed_, cluster_exited_;
    VectorClock cluster_arrived_, cluster_left_;  // the clocks of all that arrived, whether they release them or not
    std::vector<VectorClock> over_;               // by CTA: what had come to its end at barriers that it left
    std::unordered_map<uint64_t, MbarrierAgent> mbarriers_;
    uint32_t next_operation_ = 0;  // of the chunk that this cluster fills
    std::deque<Completion> completions_;
    uint64_t last_page_ = ~uint64_t{0};
    Page* page_ = nullptr;
};

}  // namespace emulator
