#include "mbarrier.h"

#include "cluster.h"

namespace emulator {
namespace {

constexpr int64_t kMostTransactions = (1 << 20) - 1;

[[noreturn]] void fail(const std::string& message, int lane) {
    throw Fault("mbarrier", message, lane);
}

}  // namespace

Mbarrier& Cta::mbarrier(uint64_t address, int lane) {
    if (address % Mbarrier::kBytes != 0) throw Fault("misaligned", "an mbarrier object is 8-byte aligned", lane);
    const auto found = mbarriers_.find(static_cast<uint32_t>(address));
    if (address >= shared_.size() || found == mbarriers_.end()) {
        fail("there is no mbarrier object at offset " + std::to_string(address) + " of shared memory", lane);
    }
    return found->second;
}

void Cta::init_mbarrier(uint64_t address, uint32_t count, int lane) {
    if (address % Mbarrier::kBytes != 0) throw Fault("misaligned", "an mbarrier object is 8-byte aligned", lane);
    if (shared(address, Mbarrier::kBytes) == nullptr) {
        throw Fault("out-of-bounds",
                    "an mbarrier object at offset " + std::to_string(address) + " of " +
                        std::to_string(shared_.size()) + " bytes of shared memory",
                    lane);
    }
    if (touches_mbarrier(address, Mbarrier::kBytes)) {
        fail("mbarrier.init at offset " + std::to_string(address) + ", where an mbarrier object is already", lane);
    }
    if (count == 0 || count > Mbarrier::kMostArrivals) {
        fail("an mbarrier for " + std::to_string(count) + " arrivals: it takes 1 to 1048575", lane);
    }
    const auto offset = static_cast<uint32_t>(address);
    mbarriers_[offset] = {count, count, 0, 0, offset};
    if (cluster.order) cluster.order->init_mbarrier(rank, offset);
    mark(address, Mbarrier::kBytes, Mark::kMbarrier);
}

void Cta::invalidate_mbarrier(uint64_t address, int lane) {
    mbarrier(address, lane);
    mbarriers_.erase(static_cast<uint32_t>(address));
    std::memset(shared_.data() + address, 0xff, Mbarrier::kBytes);
    mark(address, Mbarrier::kBytes, Mark::kUnwritten);
}

void Cta::arrive(Mbarrier& mbarrier, uint32_t count, int lane) {
    if (count == 0 || count > mbarrier.pending) {
        fail(std::to_string(count) + " arrivals at an mbarrier whose phase waits for " +
                 std::to_string(mbarrier.pending),
             lane);
    }
    mbarrier.pending -= count;
    complete_phase_if_full(mbarrier);
}

void Cta::expect_transactions(Mbarrier& mbarrier, int64_t bytes, int lane) {
    mbarrier.transactions += bytes;
    if (mbarrier.transactions > kMostTransactions) {
        fail("an mbarrier expects " + std::to_string(mbarrier.transactions) + " bytes: more than it can count", lane);
    }
    complete_phase_if_full(mbarrier);  // the bytes may have arrived, and all arrivals been made, before
}

void Cta::complete_transactions(Mbarrier& mbarrier, int64_t bytes, int lane) {
    mbarrier.transactions -= bytes;
    if (mbarrier.transactions < -kMostTransactions) {
        fail("an mbarrier has seen " + std::to_string(-mbarrier.transactions) +
                 " bytes that nobody announced: more than it can count",
             lane);
    }
    complete_phase_if_full(mbarrier);
}

void Cta::complete_phase_if_full(Mbarrier& mbarrier) {
    if (mbarrier.pending != 0 || mbarrier.transactions != 0) return;
    ++mbarrier.phase;
    if (cluster.order) cluster.order->complete_phase(rank, mbarrier.offset);
    mbarrier.pending = mbarrier.expected;
    cluster.wake_waiters_at_mbarriers();
}

}  // namespace emulator
