// Operations that continue after the instruction that started them: bulk copies and wgmma.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "fault.h"
#include "program.h"
#include "random.h"

namespace emulator {

// Keeps the asynchronous operations of a cluster that are in flight. Each is performed once, at one of these moments:
// when it is started; at a moment drawn from the seed; when no warp can run; or when `finish` requires it.
class AsyncEngine {
  public:
    using Handle = uint64_t;
    // kBound: the operation may stay in flight until `finish`. kUnbound: programs may poll, so that it ends by itself.
    enum class Latest : uint8_t { kBound, kUnbound };

    explicit AsyncEngine(Random& random) : random_(random) {}

    // `perform` carries out the whole operation, including the signal to an mbarrier. It may start other operations. A
    // Fault that it throws gets the place of the instruction that started the operation.
    Handle start(const Warp& warp, const Operation& operation, int lane, Latest latest, std::function<void()> perform);
    bool is_done(Handle handle) const { return pending_.find(handle) == pending_.end(); }
    void finish(Handle handle);  // performs it now, unless it is done
    void finish_all();

    // Performs the operations that are due at the cluster's clock, which counts the instructions of all its warps.
    void advance(int64_t clock) {
        clock_ = clock;
        if (clock >= next_due_) perform_due();
    }
    bool perform_one();  // performs a random operation; false: none is in flight

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
