// Holds the state of a running launch: each CTA's shared memory, barriers and warps, and the paths of their lanes.
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

// The writes of a launch to global memory. The host's worker threads append to it, hence the mutex.
struct WriteLog {
    std::mutex mutex;
    std::vector<GlobalWrite> writes;
};

// The options of a launch. Python's emulator.options.LaunchOptions documents each field.
struct LaunchOptions {
    uint64_t seed = 0;
    bool checks = true;
    bool tracked = false;
    bool races = true;
    bool ordered_sums = false, strict_proxy_reads = false;  // additional checks; both need `races`
    bool wgmma_waits_by_warp = false;
    bool uninitialised = false, unawaited = false;
    bool log_writes = false;
    int32_t starved_warp = -1;
    int64_t instruction_limit = int64_t{1} << 28;
    int workers = 2;

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
    int64_t shared_bytes;                    // dynamic shared memory
    int num_sms;
    uint32_t num_resident;    // CTAs that fit on the device at the same time
    Console* console;         // nullptr: printf goes to the host's standard output
    uint64_t grid_workspace;  // address of 8 zeroed bytes for a cooperative launch's grid barrier; 0: not cooperative
    bool replicated_stores;   // several warps may store the same value by the same instruction without a race
    WriteLog* write_log;      // nullptr without `log_writes`
    std::shared_ptr<PastAccesses> before;  // accesses of a previous launch that may still run; nullptr: there is none
    LaunchHistory* history;                // the race detector's records; nullptr without `races`
};

// One call of a function by some lanes of a warp: its registers, its local memory, and the frame that it returns to.
struct Frame {
    const FunctionCode* code;
    std::unique_ptr<std::byte[]> registers;
    int64_t local_base, local_end;
    Frame* caller;
    const Operation* at;  // the call instruction
    const Call* call;     // how parameters and results are copied
};

// Lanes of a warp that execute together. A warp whose lanes have diverged has several paths.
struct Path {
    enum class State : uint8_t {
        kReady,
        kMembers,  // waits at a .sync instruction for lanes of its member mask
        kBarrier,
        kMbarrier,   // from here on: the path retries its instruction when an mbarrier completes a phase
        kCluster,    // … when barrier.cluster completes
        kRegisters,  // … when other warps release registers (setmaxnreg.dec)
        kWarpgroup,  // … when another warp of the warpgroup issues a wgmma
    };
    uint32_t mask = 0;
    uint32_t in_step = 0;        // lanes that have executed every instruction together since `in_step_since`
    uint32_t in_step_since = 0;  // a time of the warp's clock in HappensBefore
    int pc = 0;
    int join = -1;  // index into Warp::joins_
    Frame* frame = nullptr;
    State state = State::kReady;
    uint32_t waiting_mask = 0;   // lanes whose guard is true at the instruction that waits
    bool has_timed_out = false;  // its mbarrier.try_wait gives up now
};

// The point where diverged paths reconverge: the immediate post-dominator of the branch, or the end of a call.
struct Join {
    int pc = -1;
    uint32_t expected = 0, arrived = 0;  // expected == 0: free
    int parent = -1;
    bool ends_call = false;
    Frame* frame = nullptr;
};

// The copies of one cp.async instruction that are in flight. A lane's copy belongs to its group `group[lane]`.
struct AsyncCopy {
    uint32_t mask;
    int64_t due;  // the cluster's clock at which it lands, unless a wait comes first
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

// A lane's memory access whose bounds and alignment have been checked.
struct Located {
    std::byte* host;
    Space space;       // kShared also for the shared memory of another CTA of the cluster
    Cta* owner;        // the CTA whose shared memory it is; nullptr in other spaces
    uint64_t address;  // an address in global memory, else an offset
};

// The race detector's record of a cp.async that some lanes have not waited for, whether or not it has landed.
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

    // Interface of the instruction families.
    template <typename T>
    T* reg(Slot slot) {
        return reinterpret_cast<T*>(base_ + slot);
    }
    uint32_t predicate(Slot slot) { return *reg<uint32_t>(slot); }
    void set_predicate(Slot slot, uint32_t mask, uint32_t bits) {
        uint32_t& word = *reg<uint32_t>(slot);
        word = (word & ~mask) | (bits & mask);
    }
    // Finds the host's memory behind a lane's access. Throws a Fault if the access is misaligned or out of bounds.
    Located locate(Space space, uint64_t address, int bytes, int lane, bool is_write);
    // Does the same for global memory, at any alignment.
    std::byte* global(uint64_t address, uint64_t bytes, int lane, bool is_write);
    // Reports to the race detector that the current instruction makes the access. Throws a Fault on a race.
    void touch(const Located& at, int bytes, int lane, bool is_write) { touch(at, bytes, lane, is_write, nullptr); }
    void touch_by_store(const Located& at, int bytes, int lane, const std::byte* value) {
        touch(at, bytes, lane, true, value);
    }
    // Locates a weak access and reports it to the race detector.
    std::byte* access(Space space, uint64_t address, int bytes, int lane, bool is_write) {
        const Located at = locate(space, address, bytes, lane, is_write);
        touch(at, bytes, lane, is_write);
        return at.host;
    }
    // Tells the race detector of a strong access: `release` before it writes memory, `acquire` after it has read.
    void release(const Located& at, int lane, bool is_atomic);
    void acquire(const Located& at, int lane);
    // Returns the CTA whose shared memory holds the address, and replaces the address by the offset in it.
    Cta& shared_owner(Space space, uint64_t& address, int lane);
    WgmmaUnit& wgmma();
    Frame* frame() { return path_.frame; }
    // Adds an access to the instruction's counters. `addresses` are the lanes' addresses before any translation.
    void count_memory(const Operation& operation, Space space, const uint64_t* addresses, int bytes, uint32_t mask);

    Next branch(const Operation& operation, uint32_t taken);
    Next branch_indexed(const Operation& operation, uint32_t mask);
    // Executes a call instruction; lane i calls the function of calls[i].
    Next call(const Operation& operation, const Call* const* calls, uint32_t mask);
    Next exit(uint32_t mask);
    Next wait_at_barrier(const Operation& operation, uint32_t mask);
    void arrive_at_barrier(const Operation& operation, uint32_t mask);
    // Blocks the path in `state`. When what it waits for has happened, it executes this instruction again.
    Next wait_and_retry(Path::State state, uint32_t mask);

    void start_copy(const AsyncCopy& copy);
    void commit_group(uint32_t mask);
    void wait_group(uint32_t mask, uint32_t most_pending);
    uint64_t num_copies_started() const { return num_copies_; }
    void land_first_copies(uint32_t mask, uint64_t count);  // those whose serial is less than `count`
    void order_first_copies(int lane, uint64_t count, const Cta& owner, const Mbarrier& mbarrier);

    // Interface of the CTA and the cluster.
    bool is_runnable() const;
    bool has_ended() const { return live_ == 0; }
    void run(int64_t budget);
    bool release(uint32_t mask);    // unblocks the path of these lanes at a barrier; false: that path is running
    void retry(Path::State state);  // makes all paths in this state ready
    bool time_out();                // lets every try_wait that is blocked give up; false: there is none
    bool has_timed_out() { return std::exchange(path_.has_timed_out, false); }  // of the running path
    uint32_t live() const { return live_; }
    uint32_t lanes() const { return lanes_; }
    const std::vector<Path>& paths() const { return paths_; }
    int thread(int lane) const { return index_ * kWarpSize + lane; }
    uint32_t number() const;      // the warp's number in the cluster
    Lanes acting(uint32_t mask);  // lanes of the running path, in the race detector's form
    uint32_t operation_number() const { return static_cast<uint32_t>(path_.pc); }  // of the current instruction
    Place position_of(const Operation* operation, int lane) const;

    Cta& cta;
    BulkGroups bulk_groups;
    // barrier.cluster: lanes that have arrived but not yet waited, and the phase in which each of them arrived.
    uint32_t cluster_arrived = 0;
    uint64_t cluster_phase[kWarpSize] = {};
    // setmaxnreg: registers of a thread (0 if unknown), and whether the warp waits for more of them.
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
    Path path_;                  // the running path; mask == 0: none runs
    std::vector<Path> paths_;    // the other paths
    std::vector<Join> joins_;
    std::vector<std::unique_ptr<Frame>> frames_;
    std::vector<std::byte> local_[kWarpSize];
    int64_t executed_ = 0, next_due_ = INT64_MAX;  // instructions so far; the clock when the first of `copies_` lands
    uint32_t committed_[kWarpSize] = {};
    std::vector<AsyncCopy> copies_;
    uint64_t num_copies_ = 0;
    std::unique_ptr<WgmmaUnit> wgmma_;  // created by the first use
    std::vector<UnorderedCopy> unordered_copies_;
    int64_t logged_at_ = -1;  // the cluster's clock at the last write that was logged
};

struct Barrier {
    uint32_t count = 0;  // threads that it waits for; 0: all of the CTA
    uint32_t arrived = 0;
    bool is_used = false;  // somebody has arrived in this phase
    int reduction = -1;    // bar.red's operation in this phase; -1: none
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

    // Returns the host's address of an access to shared memory, nullptr if it is out of bounds.
    std::byte* shared(uint64_t address, int bytes) {
        const bool is_own = address >= kReservedSharedBytes && is_inside(address, bytes, shared_.size());
        return is_own ? shared_.data() + address : nullptr;
    }
    void mark_written(uint64_t address, int bytes) { mark(address, bytes, Mark::kWritten); }
    void mark_unwritten(uint64_t address, int bytes) { mark(address, bytes, Mark::kUnwritten); }
    bool is_written(uint64_t address, int bytes) const { return !has(address, bytes, Mark::kUnwritten); }
    int64_t shared_bytes() const { return static_cast<int64_t>(shared_.size()); }

    // mbarrier objects, by offset in shared memory. A Fault if there is none; for init_mbarrier, if there is one.
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
    void check_end();  // throws a Fault if something was left unfinished; counts arrivals that nobody waited for

    // Returns true if this arrival completes the barrier; it then releases the waiting paths.
    bool arrive(const Operation& operation, Warp& warp, Frame* frame, uint32_t mask, bool waits);
    void lanes_exited();

    Cluster& cluster;
    const uint32_t rank;  // in the cluster
    const Launch& launch;
    uint32_t index[3];
    Random& random;
    Report& report;
    GlobalMemory::Region last_region;  // of the last access to global memory: a cache
    int64_t free_registers = 0;        // released by setmaxnreg.dec

  private:
    // The state of a byte of shared memory.
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

// Returns the registers of a thread at launch, as setmaxnreg counts them; 0 if the kernel does not determine them.
int registers_at_launch(const Launch& launch);

// Runs all CTAs. Throws the first Fault that occurred.
Report run_launch(const Launch& launch);

// Returns the names of all kernels that have run to their end in this process since the last call.
std::set<std::string> take_kernels_that_ran();

}  // namespace emulator
