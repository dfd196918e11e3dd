// Makes torch take the memory of CPU tensors from TrackedAllocations. This separate library is the only one that uses
// torch's headers. The emulator passes it two functions, so that neither library is linked to the other.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

namespace {

using Allocate = void* (*)(size_t);
using Deallocate = void (*)(void*);

Deallocate tracked_deallocate = nullptr;

// May be called long after tracking has stopped, when a tensor is freed that was created within it.
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

// Each start_tracking needs a stop_tracking. The first start and the last stop replace torch's allocator.
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
