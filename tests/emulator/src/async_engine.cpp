#include "async_engine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "machine.h"

namespace emulator {

AsyncEngine::Handle AsyncEngine::start(const Warp& warp, const Operation& operation, int lane, Latest latest,
                                       std::function<void()> perform) {
    const Handle handle = next_++;
    const uint32_t fate = random_.below(4);
    if (fate == 0) {
        perform();
        return handle;
    }
    const bool as_late_as_can_be = fate == 1 && latest == Latest::kBound;
    const int64_t due = as_late_as_can_be ? INT64_MAX : clock_ + random_.length(12);
    pending_.emplace(handle, Pending{std::move(perform), due, &warp, &operation, lane});
    next_due_ = std::min(next_due_, due);
    return handle;
}

void AsyncEngine::perform(std::map<Handle, Pending>::iterator found) {
    const Pending pending = std::move(found->second);
    pending_.erase(found);
    try {
        pending.perform();
    } catch (Fault& fault) {
        if (fault.place.line < 0) fault.place = pending.warp->position_of(pending.operation, pending.lane);
        throw;
    }
}

void AsyncEngine::finish(Handle handle) {
    const auto found = pending_.find(handle);
    if (found != pending_.end()) perform(found);
}

void AsyncEngine::finish_all() {
    while (perform_one()) {
    }
}

bool AsyncEngine::perform_one() {
    if (pending_.empty()) return false;
    const auto chosen = random_.below(static_cast<uint32_t>(pending_.size()));
    perform(std::next(pending_.begin(), chosen));
    return true;
}

void AsyncEngine::perform_due() {
    // Starts over after each operation, because it may have started others.
    for (auto at = pending_.begin(); at != pending_.end();) {
        if (at->second.due <= clock_) {
            perform(at);
            at = pending_.begin();
        } else {
            ++at;
        }
    }
    next_due_ = INT64_MAX;
    for (const auto& [handle, pending] : pending_) next_due_ = std::min(next_due_, pending.due);
}

}  // namespace emulator
