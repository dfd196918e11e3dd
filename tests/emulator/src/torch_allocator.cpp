// Makes torch take the memory of CPU tensors from TrackedAllocations. A library of its own, the only part of the
// emulator that sees torch; the other part is known to it by two functions, so that neither is linked to the other.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

namespace {

using Allocate = void* (*)(size_t);
using Deallocate = void (*)(void*);

Deallocate tracked_deallocate = nullptr;

// Called for as long as a tensor lives that was made within the tracking, also long after it.
void deallocate(void* begin) {
    tracked_deallocate(begin);
}

class TrackingAllocator final : public c10::Allocator {
  public:
    Allocate tracked_allocate = nullptr;

    c10::DataPtr allocate(size_t bytes) override {
        void* const begin = tracked_allocate(bytes);
        TORCH_CHECK_WITH(OutOfMemoryError, begin != nullptr || bytes == 0, "no memory for ", bytes, " bytes");
        return {begin, begin, &deallocate, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

TrackingAllocator tracking;
c10::Allocator* before = nullptr;
int depth = 0;
std::mutex mutex;

}  // namespace

// Each `start` needs a `stop`; the first and the last of them change torch's allocator.
extern "C" __attribute__((visibility("default"))) void start_tracking(Allocate allocate, Deallocate deallocate) {
    const std::lock_guard lock(mutex);
    if (depth++ > 0) return;
    tracking.tracked_allocate = allocate;
    tracked_deallocate = deallocate;
    before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&tracking, UINT8_MAX);
}

extern "C" __attribute__((visibility("default"))) void stop_tracking() {
    const std::lock_guard lock(mutex);
    if (--depth == 0) c10::SetCPUAllocator(before, UINT8_MAX);
}
