// Which access happens before which, and who touched each byte last: finds conflicting accesses that nothing orders.
//
// The agents are warps (their lanes, and the paths of these, count as one thread that executes in the order in which
// the emulator does), asynchronous operations and mbarriers. Each warp has a vector clock: of every other agent, up to
// where it is known to have happened before. What a warp releases carries its clock, what acquires it takes it over:
//
//   bar, barrier.cta       an arrival releases, a wait acquires; a warp's exit releases to barriers for all threads
//   barrier.cluster        arrive.release (not .relaxed) and wait.acquire
//   mbarrier               an arrival releases and a successful wait acquires, a relaxed one after or before a fence:
//                          in the CTA that arrives, and in others where the scope of both is .cluster
//   st.release, atom, red  with .release or .acq_rel, and relaxed (volatile) ones after a fence, to ld.acquire, atom with
//                          .acquire or .acq_rel, and relaxed (volatile) ones before a fence, of the same address, where
//                          the scopes of all include both sides. A fence before a CTA's barrier serves an atomic of
//                          another of its warps after it, and likewise a fence after the barrier: more than PTX
//                          promises to, but what hardware does and programs rely on.
//   griddepcontrol.wait    acquires all that the launch before has done, where this one began without waiting for it
//
// An asynchronous operation begins with what its issuer knows, and is ordered with nobody else: neither with what its
// issuer does next, nor with other operations. It is known to have happened by those who waited for it (`complete`).
//
// Between CTAs, an arrival or a wait of scope .cta hands nothing over that was written. It only tells that what came
// before is over: reads, which may then be written over, and the writes of bulk copies, whose completion has cluster
// scope. The pipelines of CUTLASS free the stages of a ring that way.
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

// What a warp knows, and how much of this a fence.proxy.async has shown to the async proxy, by state space.
struct Past {
    VectorClock known, visible_shared, visible_global;
    VectorClock over;  // more than what is known, but what was written may not be there to be read
    void join(const Past& from) {
        known.join(from.known), over.join(from.over);
        join_visible(from);
    }
    void join_over(const Past& from) {
        over.join(from.known), over.join(from.over);
        join_visible(from);
    }
    void clear() { known.clear(), visible_shared.clear(), visible_global.clear(), over.clear(); }

  private:
    void join_visible(const Past& from) {
        visible_shared.join(from.visible_shared), visible_global.join(from.visible_global);
    }
};

constexpr int kNumScopes = 3;

struct Knowledge {
    Past past;
    Past fenced[kNumScopes];    // when it last was at a fence of that scope at least: what relaxed writes release
    Past observed[kNumScopes];  // what relaxed reads have seen: a fence of that scope at least acquires it
    void join(const Knowledge& from);
};

// The records of a page of global memory.
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

// The launch before, in the records of this one and as an agent.
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
    // At the end of a launch; nullptr: there are more of them than are kept.
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
        Message known, visible_shared, visible_global, over;
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

// Of one cluster. `warp` is rank * (warps of a CTA) + index. A Fault is thrown where two accesses are not ordered.
class HappensBefore {
  public:
    HappensBefore(LaunchHistory& history, std::vector<std::array<uint32_t, 3>> ctas, uint32_t warps_per_cta,
                  int64_t shared_bytes);
    ~HappensBefore();

    // How an instruction, or the operation that it starts, touches memory.
    struct Touch {
        uint32_t operation;  // of the program
        int lane;
        bool is_write;
        bool is_strong = false;  // atomic, volatile, relaxed, …: not a race with another such
        Scope scope = Scope::kCta;
        bool is_silent = false;  // writes what is there already: not a race with a write by the same instruction
        bool is_sum = false;     // a race with another such, though both are strong
    };
    void touch_shared(uint32_t warp, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(warp, touch), warp, rank, offset, bytes);
    }
    void touch_global(uint32_t warp, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(warp, touch), warp, address, bytes);
    }

    // An asynchronous operation that a warp starts now, then what it touches, and how others come to know of it. What an
    // instruction does that completes in parts (the source is read, the destination is written) is several operations.
    AsyncId start(uint32_t warp, Proxy proxy);
    void touch_shared(AsyncId id, const Touch& touch, uint32_t rank, uint64_t offset, uint64_t bytes) {
        touch_shared(record_of(id, touch), operation(id).warp, rank, offset, bytes);
    }
    void touch_global(AsyncId id, const Touch& touch, uint64_t address, uint64_t bytes) {
        touch_global(record_of(id, touch), operation(id).warp, address, bytes);
    }
    // The warp has waited for it (a group): the parts of these lanes have happened before what it does next.
    void complete(AsyncId id, uint32_t warp, uint32_t lanes = kAllLanes);
    bool is_known_complete(AsyncId id, uint32_t warp, uint32_t lanes) const;
    // It counts for the current phase of this mbarrier: to be called before that phase completes.
    void complete_into_mbarrier(AsyncId id, uint32_t rank, uint64_t offset, uint32_t lanes = kAllLanes);

    // mbarrier objects, by the CTA's rank and the offset in its shared memory.
    void init_mbarrier(uint32_t rank, uint64_t offset);
    void arrive_at_mbarrier(uint32_t warp, uint32_t rank, uint64_t offset, bool releases, Scope scope);
    void complete_phase(uint32_t rank, uint64_t offset);
    // Its phase was complete.
    void wait_for_mbarrier(uint32_t warp, uint32_t rank, uint64_t offset, bool acquires, Scope scope);

    // Barriers of a CTA: everybody arrives; those who wait leave when it is complete; then it is reset.
    void arrive_at_barrier(uint32_t warp, int id);
    void leave_barrier(uint32_t warp, int id, bool is_for_all);
    void reset_barrier(uint32_t rank, int id) { barriers_[rank * kNumBarriers + id] = {}; }
    void exit(uint32_t warp);
    // All warps of the CTA have: what others do with its shared memory, and asynchronous copies of its own, must have
    // happened before. Here a barrier.cluster with .relaxed is enough.
    void end(uint32_t rank);

    void arrive_at_cluster(uint32_t warp, bool releases = true);
    void complete_cluster();
    void leave_cluster(uint32_t warp);

    void fence(uint32_t warp, Scope scope, bool acquires = true, bool releases = true);
    void fence_proxy(uint32_t warp, bool shared, bool global);

    // griddepcontrol
    void wait_for_predecessor(uint32_t warp);
    void launch_dependents(uint32_t warp);

    // Of each lane with a strong access. `write` before memory is written, `read` after memory has been read.
    void write(uint32_t warp, bool is_shared, uint64_t address, Order order, Scope scope, bool is_atomic);
    void read(uint32_t warp, bool is_shared, uint64_t address, Order order, Scope scope);

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
    AsyncOperations::Operation& operation(AsyncId id) { return history_.operations_.at(id); }
    uint32_t rank_of(uint32_t warp) const { return warp / warps_per_cta_; }
    // The CTA or the cluster that a release at this scope is meant for; 0: all of the launch.
    uint64_t owner_of(Scope scope, uint32_t warp) const {
        if (scope == Scope::kGpu) return 0;
        return uint64_t{cluster_ + 1} << 32 | (scope == Scope::kCta ? rank_of(warp) : 0);
    }
    void advance(uint32_t warp);
    void release_to(Knowledge& meeting, uint32_t warp, bool releases, Scope scope);
    void touch(Cell& cell, const Record& now, uint32_t by, bool is_shared, uint64_t address);
    void touch_shared(Record now, uint32_t by, uint32_t rank, uint64_t offset, uint64_t bytes);
    void touch_global(Record now, uint32_t by, uint64_t address, uint64_t bytes);
    bool includes(const VectorClock& clock, Agent agent, uint32_t time) const {
        return (agent.cluster == cluster_ ? clock.own(agent.component) : clock.other(agent)) >= time;
    }
    bool includes(const VectorClock& clock, AsyncId id, uint32_t lanes) const;
    bool includes(const VectorClock& clock, const Record& record) const;
    bool has_happened(const Past& past, const Record& record) const;
    bool are_morally_strong(const Record& a, const Record& b) const;
    Record record_of(uint32_t warp, const Touch& touch) const;
    Record record_of(AsyncId id, const Touch& touch);
    MbarrierAgent& mbarrier(uint32_t rank, uint64_t offset) { return mbarriers_[uint64_t{rank} << 32 | offset]; }
    void add_completion(AsyncId id, Agent agent, uint32_t clock, uint32_t lanes);
    template <typename Function>
    void at_location(bool is_shared, uint64_t address, bool creates, Function&& function);

    LaunchHistory& history_;
    const uint32_t warps_per_cta_;
    uint32_t cluster_;
    uint32_t num_components_;
    std::vector<Knowledge> warps_;
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
