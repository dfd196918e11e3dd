// What happens by itself after the instruction that started it: copies by hardware, products of matrices.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "fault.h"
#include "program.h"
#include "random.h"

namespace emulator {

// Operations under way. Each is performed once: when it is started, at a moment drawn from the seed, when somebody waits
// for it and nothing else can go on, or when `finish` says that PTX allows it to take no longer.
class AsyncEngine {
  public:
    using Handle = uint64_t;
    // Bound: somebody will call `finish`, so that the operation may take until then. Unbound: programs may poll for it.
    enum class Latest : uint8_t { kBound, kUnbound };

    explicit AsyncEngine(Random& random) : random_(random) {}

    // `perform` does the whole of it: moves what there is to move, and signals who waits (see Mbarrier). It may start other
    // operations. A Fault that it throws gets the place of the instruction that started it.
    Handle start(const Warp& warp, const Operation& operation, int lane, Latest latest, std::function<void()> perform);
    bool is_done(Handle handle) const { return pending_.find(handle) == pending_.end(); }
    void finish(Handle handle);  // now, unless it is done
    void finish_all();

    // For the cluster. Its clock counts the instructions of all its warps.
    void advance(int64_t clock) {
        clock_ = clock;
        if (clock >= next_due_) perform_due();
    }
    bool perform_one();  // by lot; false: nothing is under way

  private:
    struct Pending {
        std::function<void()> perform;
        int64_t due;
        const Warp* warp;
        const Operation* operation;
        int lane;
    };
    void perform_due();
    void perform(std::map<Handle, Pending>::iterator found);

    Random& random_;
    std::map<Handle, Pending> pending_;
    Handle next_ = 1;
    int64_t clock_ = 0, next_due_ = INT64_MAX;
};

}  // namespace emulator
