// The wgmma instructions in flight in a warp: their registers, their groups, and their order.
//
// Each warp of a warpgroup computes 16 of the 64 rows. The multiplications of a warp are performed in the order of
// issue, at moments that the AsyncEngine chooses; only then do they read shared memory. Until wgmma.wait_group covers a
// multiplication, its accumulators are stored here. Their registers are poisoned, and an instruction that touches them
// is an error. As for ptxas, a mov gives an accumulator in flight another name.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "async_engine.h"
#include "machine.h"

namespace emulator {

// The instructions that the four warps of a warpgroup have issued, for comparison.
struct WarpgroupLog {
    struct Entry {
        const Operation* operation;
        uint64_t descriptors[2];
        bool adds;  // scale-d
    };
    std::deque<Entry> entries;
    uint64_t first = 0;         // number of entries.front()
    uint64_t position[4] = {};  // number of each warp's next entry
    // The race detector's ids of the four warps' parts, for each multiplication that some warp has not waited for.
    std::deque<std::array<AsyncId, 4>> parts;
    uint64_t first_part = 1;  // number of the multiplication of parts.front()
};

// Accumulators of one warp that are in flight: 16 rows by `columns`.
struct WgmmaSums {
    struct Name {
        Frame* frame;
        TrackedRegister reg;
        int element;  // number of the accumulator register in the instruction
    };
    int columns, depth;  // N and K of the instruction
    bool is_half, is_integer;
    std::vector<float> values;
    std::vector<int32_t> integers;
    std::vector<Name> names;  // the registers that hold them
    uint64_t last;            // number of the last multiplication that adds to them

    int lane_elements() const { return columns / (is_half ? 4 : 2); }  // accumulator registers of a lane
    void load(int element, const uint32_t* lanes);                     // `lanes`: the 32 values of a register
    void store(int element, uint32_t* lanes) const;
};

// Computes one multiplication. The unit calls it when the multiplication is performed.
using WgmmaCompute = std::function<void(WgmmaSums& sums)>;

class WgmmaUnit {
  public:
    explicit WgmmaUnit(Warp& warp) : warp_(warp) {}

    // Starts a wgmma.mma_async after checking its registers. `form` has the shape of its accumulators and no values.
    void issue(const Operation& operation, const WgmmaSums& form, WgmmaCompute compute);
    // Sets the race detector's id of the multiplication that was issued last.
    void follow(AsyncId id);
    void fence() { ++num_fences_; }
    void commit();
    // Waits for the parts of all four warps, or with `wgmma_waits_by_warp` for this warp's own part. Returns false if
    // another warp has not issued its part yet; the path is then retried after the next issue.
    bool wait(uint32_t most_pending);
    bool waits_for_others = false;
    void check_warpgroup() const;  // a Fault unless the warpgroup has 4 full warps and no lane of this one has exited
    // Compares an instruction that the whole warpgroup must execute with what the other warps executed.
    void log(const WarpgroupLog::Entry& entry);
    // Called before an operation that accesses tracked registers executes.
    void touch(const Operation& operation, uint32_t mask);
    void leave(Frame* frame);  // called when its function returns

  private:
    struct Register {
        WgmmaSums* sums = nullptr;  // it holds element `element` of these accumulators in flight
        int element = 0;
        bool is_stale = false;    // it held an accumulator that has since been added to under another name
        uint64_t input_of = 0;    // number of the last multiplication that reads it as part of A
        uint64_t written_at = 0;  // number of the wgmma.fence that must follow its last write
    };
    struct Multiplication {
        uint64_t number;
        WgmmaSums* sums;
        WgmmaCompute compute;
        AsyncEngine::Handle handle;
    };
    Register& state(Frame* frame, const TrackedRegister& reg);
    bool is_input(const Register& reg) const { return reg.input_of > completed_; }
    void forget_name(Frame* frame, const TrackedRegister& reg, Register& state);
    void read(Register& state) const;
    void write(Frame* frame, const TrackedRegister& reg);
    void move(Frame* frame, const TrackedRegister& from, const TrackedRegister& to, uint32_t mask);
    WgmmaSums& sums_of(const TrackedAccess& access, const WgmmaSums& form, Frame* frame);
    void perform(uint64_t number);
    void complete(uint64_t number);
    template <typename Function>
    void each_of_warpgroup(Function&& function) const;
    bool tells_of(int warp) const;  // true: a wait by this warp covers that warp's part

    Warp& warp_;
    std::unordered_map<Frame*, std::vector<Register>> registers_;
    Frame* last_frame_ = nullptr;  // a cache of the last lookup in `registers_`
    std::vector<Register>* last_registers_ = nullptr;
    std::vector<std::unique_ptr<WgmmaSums>> sums_;
    std::deque<Multiplication> pending_;  // those that no wait covers yet
    std::deque<uint64_t> groups_;         // number of the last multiplication of each committed group
    uint64_t issued_ = 0, performed_ = 0, completed_ = 0;
    uint64_t num_fences_ = 0;
};

}  // namespace emulator
