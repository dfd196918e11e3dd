// The race detector: keeps records of who touched each byte last, and finds conflicting accesses that nothing orders.
//
// The agents are the lanes of warps, asynchronous operations and mbarriers. Each warp has a vector clock, which holds
// for every other agent the time up to which its accesses happened before. A release publishes the clock, and an
// acquire joins the published clock into the acquirer's. These instructions release and acquire:
//
//   bar.warp.sync          The lanes that meet release and acquire. So does wgmma.wait_group: more than PTX says.
//   bar, barrier.cta       An arrival releases, a wait acquires. An exit releases to the barriers for all threads.
//   barrier.cluster        arrive.release (not .relaxed) releases, wait.acquire acquires.
//   mbarrier               An arrival releases, a successful wait acquires; relaxed ones only with a fence before the
//                          arrival or after the wait. Between two CTAs, both must have scope .cluster.
//   st, atom, red, ld      st, atom and red release if they are .release or .acq_rel, or relaxed (volatile) after a
//                          fence. ld and atom acquire if they are .acquire or .acq_rel, or relaxed (volatile) before a
//                          fence. Both must have the same address, and all scopes must include both threads. A fence
//                          before a CTA's barrier (or bar.warp.sync) also serves another thread's atomic after it, and
//                          a fence after the barrier an atomic before it: PTX does not promise this, but hardware does
//                          it and programs rely on it.
//   griddepcontrol.wait    Acquires all that the previous launch did, if this launch began without waiting for it.
//
// All lanes of a warp share one clock while they know the same. What only some lanes have acquired is stored as a part
// of its own until they meet the others. A release by some lanes covers their own accesses, but the other lanes'
// accesses only up to where they last met. Nothing else orders lanes: neither reconvergence, nor shuffles, nor votes.
// As an exception, lanes that execute in step, as one path that has not diverged, may access each other's data; other
// warps and asynchronous operations do not learn of these accesses by that.
//
// An asynchronous operation begins with what its issuer knows. It is ordered neither with what the issuer does next nor
// with other operations. Only those who wait for it (`complete`) know that it has happened.
//
// Between CTAs, an arrival or a wait of scope .cta makes no written data visible. It only tells that earlier accesses
// are over. That suffices to overwrite what was read, to use what bulk copies wrote (their completion has cluster
// scope), and for a bulk copy to overwrite what threads wrote to shared memory before a proxy fence. CUTLASS's
// pipelines release the stages of a ring that way.
//
// Proxies: what the generic proxy wrote needs a fence.proxy.async before the async proxy touches it. The fence may be
// anywhere on the causality path between the two, because PTX does not say which thread has to execute it. What the
// generic proxy only read may be overwritten without a fence, unless `strict_proxy_reads` is set: the reading thread
// has its value already, and pipelines rely on it. The other direction needs no fence either, because the completion of
// an operation of the async proxy implies one.
//
// All functions are called when the instruction executes. This includes the accesses of asynchronous operations,
// although those are performed later.
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

// What lanes know to have happened before, and how much of it a fence.proxy.async has made visible to the async proxy.
struct Past {
    VectorClock known, visible_shared, visible_global;
    VectorClock over;          // accesses that are over, though what they wrote may not be visible
    VectorClock over_visible;  // the part of `over` before a proxy fence: the async proxy may overwrite what it read
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
    Past fenced[kNumScopes];    // what was known at the last fence of at least that scope: relaxed writes release it
    Past observed[kNumScopes];  // what relaxed reads have seen: the next fence of at least that scope acquires it
    void join(const Knowledge& from);
};

// Lanes of a warp that execute an instruction. `warp` is (rank of the CTA) * (warps of a CTA) + (index of the warp).
struct Lanes {
    uint32_t warp, mask;
    uint32_t in_step = 0;                 // lanes that have executed every instruction with these since `in_step_since`
    uint32_t in_step_since = UINT32_MAX;  // a time of the warp
};

// The records of kBytes of global memory.
struct Page {
    static constexpr uint64_t kBytes = 4096;
    Cell cells[kBytes / Cell::kBytes];
};

// A launch's accesses to global memory, for a next launch that begins before its end (programmatic dependent launch).
struct PastAccesses {
    std::string kernel;
    std::vector<std::pair<uint64_t, std::unique_ptr<Page>>> pages;
    bool are_last;  // true: this launch waited for the one before it, so that only this one may still run
};

// The agent that stands for the previous launch, in clocks and in records.
constexpr Agent kPredecessor{~uint32_t{0}, 0};

// The state that all clusters of a launch share. Several threads of the host may use it at the same time.
class LaunchHistory {
  public:
    // `fault` converts a conflict into an error. `strict_proxy_reads`: see the top of this file.
    LaunchHistory(std::function<Fault(const Conflict&)> fault, bool strict_proxy_reads)
        : fault(std::move(fault)), strict_proxy_reads(strict_proxy_reads) {}

    // Takes over the records of the previous launch, whose end this launch does not wait for.
    void follow(PastAccesses&& before);
    const std::string& predecessor() const { return predecessor_; }  // empty: there is none
    // Gives the records away at the end of the launch. Returns nullptr if they are too many to keep.
    std::shared_ptr<PastAccesses> take_accesses(const std::string& kernel);

    // Registers a cluster by the indices of its CTAs, which messages need. Returns the cluster's number.
    uint32_t add_cluster(std::vector<std::array<uint32_t, 3>> ctas, uint32_t warps_per_cta);
    struct Origin {
        std::array<uint32_t, 3> cta;
        uint32_t rank;  // of the CTA in the cluster
        uint32_t warp;  // in the CTA
    };
    Origin origin(const Record& record) const;
    const std::function<Fault(const Conflict&)> fault;
    const bool strict_proxy_reads;

  private:
    friend class HappensBefore;

    // What was released to an address at one scope. `owner`: see owner_of.
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
    // Somebody has waited for the predecessor; somebody let the next launch begin without having waited.
    std::atomic<bool> has_waited_{false}, lets_begin_early_{false};
    AsyncOperations operations_;
    mutable std::mutex mutex_;
    struct ClusterPlace {
        std::vector<std::array<uint32_t, 3>> ctas;
        uint32_t warps_per_cta;
    };
    std::deque<ClusterPlace> clusters_;
};

// The race detector of one cluster. Its touch_… functions throw a Fault if nothing orders two conflicting accesses.
class HappensBefore {
  public:
    // `lanes`: the mask of lanes that exist, for each warp of a CTA.
    HappensBefore(LaunchHistory& history, std::vector<std::array<uint32_t, 3>> ctas, const std::vector<uint32_t>& lanes,
                  int64_t shared_bytes);
    ~HappensBefore();

    // The kind of access that an instruction, or an operation that it starts, makes.
    struct Touch {
        uint32_t operation;  // of the program
        bool is_write;
        bool is_strong = false;  // atomic, volatile, relaxed, …: two strong accesses are no race
        Scope scope = Scope::kCta;
        bool is_silent = false;  // writes the value that is there already: no race with a write by the same instruction
        bool is_sum = false;     // adds floating-point numbers: two of them are a race, though both are strong
    };
    void touch_shared(const Lanes& by, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(by, touch), by, rank, offset, bytes);
    }
    void touch_global(const Lanes& by, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(by, touch), by, address, bytes);
    }

    // Starts an asynchronous operation; the functions that follow add its accesses and its completions. It knows what
    // any lane that starts it knows. An instruction that completes in several steps (its source has been read, its
    // destination has been written) is one operation for each step.
    AsyncId start(Proxy proxy);
    void touch_shared(AsyncId id, const Lanes& by, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(id, by, touch), by, rank, offset, bytes);
    }
    void touch_global(AsyncId id, const Lanes& by, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(id, by, touch), by, address, bytes);
    }
    // Each of these lanes has waited for all of the operation, or for its own part, which thus happened before.
    void complete(AsyncId id, const Lanes& who) { add_completion(id, who.warp, time(who.warp), kAllLanes, who.mask); }
    void complete_own_parts(AsyncId id, const Lanes& who) { add_completion(id, who.warp, time(who.warp), who.mask, 0); }
    // Returns true if all lanes of the warp know that these lanes' parts of the operation are complete.
    bool is_known_complete(AsyncId id, uint32_t warp, uint32_t lanes) const;
    // Makes the operation count for the current phase of an mbarrier. Must be called before that phase completes.
    void complete_into_mbarrier(AsyncId id, uint32_t rank, uint64_t offset, uint32_t lanes = kAllLanes);

    // mbarrier objects, by the CTA's rank and the offset in its shared memory.
    void init_mbarrier(uint32_t rank, uint64_t offset);
    void arrive_at_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool releases, Scope scope);
    void complete_phase(uint32_t rank, uint64_t offset);
    // Called after a wait that found its phase complete.
    void wait_for_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool acquires, Scope scope);

    // bar.warp.sync, once the lanes have gathered.
    void synchronise(const Lanes& who);

    // Barriers of a CTA: all participants arrive; when it is complete, those that wait leave; then it is reset.
    void arrive_at_barrier(const Lanes& who, int id);
    void leave_barrier(const Lanes& who, int id, bool is_for_all);
    void reset_barrier(uint32_t rank, int id) { barriers_[rank * kNumBarriers + id] = {}; }
    void exit(const Lanes& who);
    // Called when all warps of the CTA have exited. Other CTAs' accesses to its shared memory, and its own bulk copies,
    // must have happened before; for this, a barrier.cluster with .relaxed is enough.
    void end(uint32_t rank);

    void arrive_at_cluster(const Lanes& who, bool releases = true);
    void complete_cluster();
    void leave_cluster(const Lanes& who);

    void fence(const Lanes& who, Scope scope, bool acquires = true, bool releases = true);
    // `shared`: shared memory of the CTA; `other_ctas`: that of the cluster's other CTAs; `global`: global memory.
    void fence_proxy(const Lanes& who, bool shared, bool other_ctas, bool global);

    // Starts a new time of the warp for what it does from now on, and returns it.
    uint32_t advance(uint32_t warp) { return ++warps_[warp].time; }

    // griddepcontrol
    void wait_for_predecessor(const Lanes& who);
    void launch_dependents(const Lanes& who);

    // A strong access by one lane: `write` is called before memory is written, `read` after memory has been read.
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
        uint32_t time = 1;                    // advances whenever others may learn of its accesses so far
        uint32_t fenced_at[kNumScopes] = {};  // time of the last fence of at least that scope by all of its lanes
        Knowledge known;                      // what all of its lanes know, also of each other
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
    // Returns the CTA or the cluster that can acquire a release of this scope; 0: the whole launch.
    uint64_t owner_of(Scope scope, uint32_t warp) const {
        if (scope == Scope::kGpu) return 0;
        return uint64_t{cluster_ + 1} << 32 | (scope == Scope::kCta ? rank_of(warp) : 0);
    }
    // Calls function(Knowledge) for the warp's knowledge and for each part that one of these lanes knows.
    template <typename Function>
    void each_known(const Lanes& who, Function&& function) const;
    // Adds to the clock what each of these lanes did itself until `time`.
    void add_own(VectorClock& clock, const Lanes& who, uint32_t time) const;
    void release(Knowledge& into, const Lanes& who, bool releases = true, Scope scope = Scope::kCluster) const;
    void acquire(const Lanes& who, const Knowledge& from) { shared_by(who).join(from); }
    Knowledge& shared_by(const Lanes& who);
    void forget_parts(const Lanes& who);
    void touch(Cell& cell, Record now, const Lanes& by, bool is_shared, uint64_t address);
    void touch_shared(Record now, const Lanes& by, uint32_t rank, uint64_t offset, uint64_t bytes);
    void touch_global(Record now, const Lanes& by, uint64_t address, uint64_t bytes);
    // Returns those of an agent's lanes that are not known to have reached `time`. An mbarrier counts as one lane.
    uint32_t unknown_in(const VectorClock& clock, Agent agent, uint32_t lanes, uint32_t time) const;
    uint32_t unknown_to(const Lanes& who, VectorClock Past::* clock, Agent agent, uint32_t lanes, uint32_t time) const;
    // Returns those lanes of a record for which unknown(agent, lanes, time) returns them.
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
    std::vector<VectorClock> over_;               // by CTA: what is over according to the cluster barriers that it left
    std::unordered_map<uint64_t, MbarrierAgent> mbarriers_;
    uint32_t next_operation_ = 0;  // number of the cluster's next asynchronous operation, in a chunk of its own
    std::deque<Completion> completions_;
    uint64_t last_page_ = ~uint64_t{0};
    Page* page_ = nullptr;
};

}  // namespace emulator
