// Allocates the workspaces of kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "api/checks.h"
#include "host/params.h"
#include "scheduler/launch_id.h"

namespace fastattn {

// Divides one tensor's memory among several arrays, since each allocation costs host time at every call. Arrays are
// taken twice: without memory, which gives the size, and then with it.
class WorkspaceArena {
  public:
    explicit WorkspaceArena(float* memory) : memory_(memory) {}

    // Returns an array of `count` numbers, aligned to 128 bytes; null without memory, and where count is 0.
    template <typename Number = float>
    Number* take(int64_t count) {
        static_assert(sizeof(Number) % sizeof(float) == 0 && alignof(Number) <= 128);
        constexpr int64_t kAlignment = 128 / sizeof(float), kFloats = sizeof(Number) / sizeof(float);
        float* const begin = memory_ != nullptr && count > 0 ? memory_ + taken_ : nullptr;
        taken_ += (count * kFloats + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<Number*>(begin);
    }

    // How many floats all arrays take.
    int64_t taken() const { return taken_; }

  private:
    float* memory_;
    int64_t taken_ = 0;
};

// Allocates partials of `rows` rows, and arrival counters, for one launch. The tensor has to live until the kernel is
// started.
inline Tensor make_partial_workspace(PartialWorkspace& partials, const Tensor& query, int64_t rows, int64_t value_dim,
                                     int64_t counters) {
    const auto allocate = [&](float* memory) {
        WorkspaceArena arena(memory);
        partials.values = arena.take(rows * value_dim);
        partials.sums = arena.take(rows * 2);
        partials.arrivals = arena.take<uint64_t>(counters);
        return arena.taken();
    };
    Tensor workspace = torch::stable::new_empty(query, {allocate(nullptr)}, ScalarType::Float);
    allocate(static_cast<float*>(workspace.data_ptr()));
    partials.launch_id = launch_id();
    return workspace;
}

}  // namespace fastattn
