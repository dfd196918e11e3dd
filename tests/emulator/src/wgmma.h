// The asynchronous matrix multiplications of a warp: which registers they hold, their groups, and their order.
//
// Each warp of a warpgroup computes its 16 of the 64 rows by itself. A multiplication reads shared memory at a moment
// that the AsyncEngine chooses, in the order in which the warp issued them. Its accumulators live here, not in the
// registers, until wgmma.wait_group covers it: until then the registers are poisoned, and an instruction that touches
// them is an error. A mov between registers gives a value that is under way another name, as it does for ptxas.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "async_engine.h"
#include "machine.h"

namespace emulator {

// What the four warps have issued, so that they can be compared.
struct WarpgroupLog {
    struct Entry {
        const Operation* operation;
        uint64_t descriptors[2];
        bool adds;  // scale-d
    };
    std::deque<Entry> entries;
    uint64_t first = 0;         // number of the entry in front
    uint64_t position[4] = {};  // of each warp
    // Of each multiplication that not every warp has waited for, what the race detector knows the warps' parts as.
    std::deque<std::array<AsyncId, 4>> parts;
    uint64_t first_part = 1;  // number of the multiplication in front
};

// Accumulators of one warp that are under way: 16 rows by `columns`.
struct WgmmaSums {
    struct Name {
        Frame* frame;
        TrackedRegister reg;
        int element;  // of a lane's
    };
    int columns, depth;  // of the multiplications' shape
    bool is_half, is_integer;
    std::vector<float> values;
    std::vector<int32_t> integers;
    std::vector<Name> names;  // the registers that stand for them
    uint64_t last;            // number of the last multiplication into them

    int lane_elements() const { return columns / (is_half ? 4 : 2); }  // registers
    void load(int element, const uint32_t* lanes);                     // a register's 32 values
    void store(int element, uint32_t* lanes) const;
};

// What the unit asks of the instruction: compute, when the time has come.
using WgmmaCompute = std::function<void(WgmmaSums& sums)>;

class WgmmaUnit {
  public:
    explicit WgmmaUnit(Warp& warp) : warp_(warp) {}

    // Of wgmma.mma_async: checks its registers, and starts it. `form`: an empty one of the shape that it has.
    void issue(const Operation& operation, const WgmmaSums& form, WgmmaCompute compute);
    // What the race detector knows the last one as.
    void follow(AsyncId id);
    void fence() { ++num_fences_; }
    void commit();
    // Multiplications are the warpgroup's: who has waited knows that all four warps' parts are over, unless launches
    // have `wgmma_waits_by_warp`. False: another warp has not issued its part yet, and `retry` will tell.
    bool wait(uint32_t most_pending);
    bool waits_for_others = false;
    void check_warpgroup() const;  // all its warps are there, and this one is whole
    // What the warp executes of the warpgroup's common instructions is compared with the other warps'.
    void log(const WarpgroupLog::Entry& entry);
    // Before an operation that has `tracked` executes.
    void touch(const Operation& operation, uint32_t mask);
    void leave(Frame* frame);  // its function returns

  private:
    struct Register {
        WgmmaSums* sums = nullptr;  // it stands for one of these, at `element`
        int element = 0;
        bool is_stale = false;    // it was a name of sums that have been added to since under another
        uint64_t input_of = 0;    // number of the last multiplication that has it in A
        uint64_t written_at = 0;  // number of the fence that has to follow the last write
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
    bool tells_of(int warp) const;  // of the warpgroup: that a wait of this warp covers its part

    Warp& warp_;
    std::unordered_map<Frame*, std::vector<Register>> registers_;
    Frame* last_frame_ = nullptr;  // whose registers were looked at last
    std::vector<Register>* last_registers_ = nullptr;
    std::vector<std::unique_ptr<WgmmaSums>> sums_;
    std::deque<Multiplication> pending_;  // not covered by a wait
    std::deque<uint64_t> groups_;         // number of the last multiplication of each
    uint64_t issued_ = 0, performed_ = 0, completed_ = 0;
    uint64_t num_fences_ = 0;
};

}  // namespace emulator
