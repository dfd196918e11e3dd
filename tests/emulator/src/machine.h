// The state of a running launch: the CTA with its shared memory and barriers, its warps, and the paths of their lanes.
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "access_history.h"
#include "bulk_groups.h"
#include "console.h"
#include "fault.h"
#include "mbarrier.h"
#include "memory.h"
#include "program.h"
#include "random.h"
#include "report.h"

namespace emulator {

class LaunchHistory;
struct Lanes;
struct PastAccesses;

// The writes of a launch to global memory, which its CTAs log from several threads of the host.
struct WriteLog {
    std::mutex mutex;
    std::vector<GlobalWrite> writes;
};

// How a launch runs, and which of its mistakes are errors: emulator.options.LaunchOptions says what each means.
struct LaunchOptions {
    uint64_t seed = 0;
    bool checks = true;
    bool tracked = false;
    bool races = true;
    bool ordered_sums = false, strict_proxy_reads = false;  // more of what `races` finds
    bool wgmma_waits_by_warp = false;
    bool uninitialised = false, unawaited = false;
    bool log_writes = false;
    int32_t starved_warp = -1;
    int64_t instruction_limit = int64_t{1} << 28;
    int workers = 2;

    // Calls take(name, field) for each of them.
    template <typename Take>
    void for_each(Take&& take) {
        take("seed", seed);
        take("checks", checks);
        take("tracked", tracked);
        take("races", races);
        take("ordered_sums", ordered_sums);
        take("strict_proxy_reads", strict_proxy_reads);
        take("wgmma_waits_by_warp", wgmma_waits_by_warp);
        take("uninitialised", uninitialised);
        take("unawaited", unawaited);
        take("log_writes", log_writes);
        take("starved_warp", starved_warp);
        take("instruction_limit", instruction_limit);
        take("workers", workers);
    }
};

struct Launch : LaunchOptions {
    const Program* program;
    const GlobalMemory* memory;
    std::vector<std::byte> parameters;
    uint32_t grid[3], block[3], cluster[3];  // grid and cluster in CTAs
    int64_t shared_bytes;                    // dynamic
    int num_sms;
    uint32_t num_resident;    // CTAs that the device holds at a time
    Console* console;         // nullptr: printf goes to the host's standard output
    uint64_t grid_workspace;  // of a cooperative launch: 8 bytes of zeros in global memory; 0: it is none
    bool replicated_stores;   // several warps may store the same value by the same instruction without a race
    WriteLog* write_log;      // while it runs; nullptr without `log_writes`
    std::shared_ptr<PastAccesses> before;  // of the launch whose end this one does not wait for; nullptr: there is none
    LaunchHistory* history;                // of accesses, while it runs; nullptr without `races`
};

// One call of a function by some lanes of a warp: its registers, its local memory, and where it returns to.
struct Frame {
    const FunctionCode* code;
    std::unique_ptr<std::byte[]> registers;
    int64_t local_base, local_end;
    Frame* caller;
    const Operation* at;  // the instruction that called, and how it passes parameters
    const Call* call;
};

// Lanes of a warp that execute together. A warp has more than one path where its lanes have parted.
struct Path {
    enum class State : uint8_t {
        kReady,
        kMembers,  // at a .sync instruction whose member mask names lanes that are not there
        kBarrier,
        kMbarrier,   // looks again when a phase of one completes
        kCluster,    // likewise, for barrier.cluster
        kRegisters,  // likewise, for registers that others give back (setmaxnreg)
        kWarpgroup,  // likewise, for other warps' part of wgmma instructions
    };
    uint32_t mask = 0;
    uint32_t in_step = 0;  // lanes that have executed every instruction together since this time (HappensBefore's)
    uint32_t in_step_since = 0;
    int pc = 0;
    int join = -1;  // of Warp::joins_
    Frame* frame = nullptr;
    State state = State::kReady;
    uint32_t waiting_mask = 0;   // lanes that would execute the instruction
    bool has_timed_out = false;  // it has waited for an mbarrier for as long as it may
};

// Where paths that came from one become one again: the immediate post-dominator of the branch, or the end of a call.
struct Join {
    int pc = -1;
    uint32_t expected = 0, arrived = 0;  // expected == 0: free
    int parent = -1;
    bool ends_call = false;
    Frame* frame = nullptr;
};

// cp.async of one instruction, on its way. A lane's copies belong to its group `group[lane]`.
struct AsyncCopy {
    uint32_t mask;
    int64_t due;  // the cluster's clock at which it lands, unless it is waited for
    int bytes;
    uint64_t shared[kWarpSize], global[kWarpSize];
    uint8_t source_bytes[kWarpSize];
    uint32_t group[kWarpSize];
    uint64_t serial;
};

class Cluster;
class Cta;
class WgmmaUnit;
struct WarpgroupLog;

// A lane's access that has been checked.
struct Located {
    std::byte* host;
    Space space;       // kShared for that of any CTA of the cluster
    Cta* owner;        // of shared memory
    uint64_t address;  // an offset, but for global memory
};

// cp.async that the lanes have not waited for, as the happens-before order has them: whether they have landed or not.
struct UnorderedCopy {
    AsyncId id;
    uint32_t lanes;
    uint64_t serial;
    std::array<uint32_t, kWarpSize> group;
};

class Warp {
  public:
    Warp(Cta& cta, int index, uint32_t lanes);
    ~Warp();

    // For the instruction families.
    template <typename T>
    T* reg(Slot slot) {
        return reinterpret_cast<T*>(base_ + slot);
    }
    uint32_t predicate(Slot slot) { return *reg<uint32_t>(slot); }
    void set_predicate(Slot slot, uint32_t mask, uint32_t bits) {
        uint32_t& word = *reg<uint32_t>(slot);
        word = (word & ~mask) | (bits & mask);
    }
    // Where a lane's `bytes` bytes are, or a Fault.
    Located locate(Space space, uint64_t address, int bytes, int lane, bool is_write);
    // Likewise for so many bytes of global memory, at any alignment.
    std::byte* global(uint64_t address, uint64_t bytes, int lane, bool is_write);
    // The instruction that executes accesses them now: a Fault if that conflicts with another access.
    void touch(const Located& at, int bytes, int lane, bool is_write) { touch(at, bytes, lane, is_write, nullptr); }
    void touch_by_store(const Located& at, int bytes, int lane, const std::byte* value) {
        touch(at, bytes, lane, true, value);
    }
    // Both, for accesses that say nothing of their order with others.
    std::byte* access(Space space, uint64_t address, int bytes, int lane, bool is_write) {
        const Located at = locate(space, address, bytes, lane, is_write);
        touch(at, bytes, lane, is_write);
        return at.host;
    }
    // What a strong access releases, before it writes to memory, and acquires, after it has read.
    void release(const Located& at, int lane, bool is_atomic);
    void acquire(const Located& at, int lane);
    // The CTA whose shared memory an address is in; leaves the offset there.
    Cta& shared_owner(Space space, uint64_t& address, int lane);
    WgmmaUnit& wgmma();
    Frame* frame() { return path_.frame; }
    // For the counters; `addresses` as the instruction has them.
    void count_memory(const Operation& operation, Space space, const uint64_t* addresses, int bytes, uint32_t mask);

    Next branch(const Operation& operation, uint32_t taken);
    Next branch_indexed(const Operation& operation, uint32_t mask);
    // The lanes call functions: calls[lane], all of one instruction.
    Next call(const Operation& operation, const Call* const* calls, uint32_t mask);
    Next exit(uint32_t mask);
    Next wait_at_barrier(const Operation& operation, uint32_t mask);
    void arrive_at_barrier(const Operation& operation, uint32_t mask);
    // The lanes execute this instruction again when something has happened that they wait for.
    Next wait_and_retry(Path::State state, uint32_t mask);

    void start_copy(const AsyncCopy& copy);
    void commit_group(uint32_t mask);
    void wait_group(uint32_t mask, uint32_t most_pending);
    uint64_t num_copies_started() const { return num_copies_; }
    void land_first_copies(uint32_t mask, uint64_t count);  // of all that these lanes have started
    void order_first_copies(int lane, uint64_t count, const Cta& owner, const Mbarrier& mbarrier);

    // For the CTA.
    bool is_runnable() const;
    bool has_ended() const { return live_ == 0; }
    void run(int64_t budget);
    bool release(uint32_t mask);    // the path with these lanes waited at a barrier; false: it is the one that runs
    void retry(Path::State state);  // all paths that wait so
    bool time_out();                // likewise for mbarriers, and they give up; false: there are none
    bool has_timed_out() { return std::exchange(path_.has_timed_out, false); }  // the path that runs
    uint32_t live() const { return live_; }
    uint32_t lanes() const { return lanes_; }
    const std::vector<Path>& paths() const { return paths_; }
    int thread(int lane) const { return index_ * kWarpSize + lane; }
    uint32_t number() const;      // in the cluster
    Lanes acting(uint32_t mask);  // lanes of the path that runs, as the happens-before order has them
    uint32_t operation_number() const { return static_cast<uint32_t>(path_.pc); }  // of the one that executes
    Place place_of(const Operation* operation, int lane) const;

    Cta& cta;
    BulkGroups bulk_groups;
    // barrier.cluster: lanes that have arrived and not yet waited, and the phase that each arrived in.
    uint32_t cluster_arrived = 0;
    uint64_t cluster_phase[kWarpSize] = {};
    // setmaxnreg: what a thread has, 0 if that is not known; and whether the warp waits for more.
    int num_registers;
    bool waits_for_registers = false;

  private:
    friend class Cta;
    bool choose_path();
    uint32_t lanes_of_aligned(const Operation& operation) const;
    bool arrive_at_joins();
    bool gather_members(const Operation& operation, uint32_t& mask);
    void complete(int join);
    int new_join(int pc, uint32_t expected, int parent, bool ends_call);
    Frame* new_frame(const FunctionCode& code, Frame* caller, const Operation* at, const Call* call);
    void enter(Path& path, const Operation& operation, const Call& call);
    void return_from_call(uint32_t mask);
    void touch(const Located& at, int bytes, int lane, bool is_write, const std::byte* value);
    void follow(const AsyncCopy& copy);
    void log_write(uint64_t address);
    void order_copies(uint32_t mask, uint32_t most_pending);
    void land(const AsyncCopy& copy, uint32_t mask);
    void land_due_copies();
    template <typename Predicate>
    void land_copies(uint32_t mask, Predicate&& is_done);
    [[noreturn]] void fail_access(Space space, uint64_t address, int bytes, int lane, bool is_write);

    int index_;
    uint32_t lanes_, live_;
    std::byte* base_ = nullptr;  // registers of the running path's frame
    Path path_;                  // that runs; mask == 0: none
    std::vector<Path> paths_;    // that do not
    std::vector<Join> joins_;
    std::vector<std::unique_ptr<Frame>> frames_;
    std::vector<std::byte> local_[kWarpSize];
    int64_t executed_ = 0, next_due_ = INT64_MAX;  // instructions; when the first of `copies_` lands
    uint32_t committed_[kWarpSize] = {};
    std::vector<AsyncCopy> copies_;
    uint64_t num_copies_ = 0;
    std::unique_ptr<WgmmaUnit> wgmma_;  // of programs that have such instructions
    std::vector<UnorderedCopy> unordered_copies_;
    int64_t logged_at_ = -1;  // the cluster's clock at the last write that was logged
};

struct Barrier {
    uint32_t count = 0;    // of threads that it waits for; 0: all of the CTA
    uint32_t arrived = 0;  // threads
    bool is_used = false;  // in the phase that runs
    int reduction = -1;    // of bar.red in this phase; -1: none
    uint32_t ones = 0;     // threads whose predicate was true
    struct Waiting {
        Warp* warp;
        Frame* frame;
        uint32_t mask;
        const Operation* operation;
    };
    std::vector<Waiting> waiting;
};

class Cta {
  public:
    Cta(Cluster& cluster, uint32_t rank, const uint32_t (&index)[3]);
    ~Cta();

    // Shared memory by address; nullptr: outside of it.
    std::byte* shared(uint64_t address, int bytes) {
        const bool is_own = address >= kReservedSharedBytes && is_inside(address, bytes, shared_.size());
        return is_own ? shared_.data() + address : nullptr;
    }
    void mark_written(uint64_t address, int bytes) { mark(address, bytes, Mark::kWritten); }
    void mark_unwritten(uint64_t address, int bytes) { mark(address, bytes, Mark::kUnwritten); }
    bool is_written(uint64_t address, int bytes) const { return !has(address, bytes, Mark::kUnwritten); }
    int64_t shared_bytes() const { return static_cast<int64_t>(shared_.size()); }

    // mbarrier objects by their offset in shared memory. A Fault where there is none, or one already.
    Mbarrier& mbarrier(uint64_t address, int lane);
    void init_mbarrier(uint64_t address, uint32_t count, int lane);
    void invalidate_mbarrier(uint64_t address, int lane);
    bool touches_mbarrier(uint64_t address, int bytes) const {
        return !mbarriers_.empty() && has(address, bytes, Mark::kMbarrier);
    }
    const Mbarriers& mbarriers() const { return mbarriers_; }
    void arrive(Mbarrier& mbarrier, uint32_t count, int lane);
    void expect_transactions(Mbarrier& mbarrier, int64_t bytes, int lane);
    void complete_transactions(Mbarrier& mbarrier, int64_t bytes, int lane);

    WarpgroupLog& warpgroup_log(int warpgroup);

    const std::vector<std::unique_ptr<Warp>>& warps() const { return warps_; }
    const Barrier& barrier(int id) const { return barriers_[id]; }
    bool has_ended() const;
    void check_end();  // a Fault if something was left unfinished; counts arrivals that nobody waited for

    // True: the barrier was complete, and the others have been released.
    bool arrive(const Operation& operation, Warp& warp, Frame* frame, uint32_t mask, bool waits);
    void lanes_exited();

    Cluster& cluster;
    const uint32_t rank;  // in the cluster
    const Launch& launch;
    uint32_t index[3];
    Random& random;
    Report& report;
    GlobalMemory::Region last_region;  // that an access was found in
    int64_t free_registers = 0;        // that setmaxnreg has given back

  private:
    // What each byte of shared memory holds.
    enum class Mark : uint8_t { kUnwritten, kWritten, kMbarrier };
    void mark(uint64_t address, int bytes, Mark mark) {
        std::memset(marks_.data() + address, static_cast<int>(mark), bytes);
    }
    bool has(uint64_t address, int bytes, Mark mark) const {
        return std::memchr(marks_.data() + address, static_cast<int>(mark), bytes) != nullptr;
    }
    bool complete_if_full(int id);
    void complete_phase_if_full(Mbarrier& mbarrier);

    std::vector<std::byte> shared_;
    std::vector<Mark> marks_;
    Mbarriers mbarriers_;
    std::vector<std::unique_ptr<Warp>> warps_;
    Barrier barriers_[16];
    std::vector<WarpgroupLog> warpgroup_logs_;
};

// Of each thread, as setmaxnreg counts them; 0: the kernel does not say.
int registers_at_launch(const Launch& launch);

// Runs all CTAs; throws the first Fault that occurred.
Report run_launch(const Launch& launch);

// The names of all kernels that have run to their end since the last call, in this process.
std::set<std::string> take_kernels_that_ran();

}  // namespace emulator
