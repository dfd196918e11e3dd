// Several arrays of a workspace in one tensor: each allocation costs host time at every call.
#pragma once

#include <cstdint>

namespace fastattn {

// One tensor's memory, dealt out in the order in which it is asked for: sizes first, then addresses.
class Dealer {
  public:
    explicit Dealer(float* memory) : memory_(memory) {}

    // Of so many numbers, aligned to 128 bytes; null without memory, and where there are none.
    template <typename Number = float>
    Number* take(int64_t count) {
        static_assert(sizeof(Number) % sizeof(float) == 0 && alignof(Number) <= 128);
        constexpr int64_t kAlignment = 128 / sizeof(float), kFloats = sizeof(Number) / sizeof(float);
        float* const begin = memory_ != nullptr && count > 0 ? memory_ + taken_ : nullptr;
        taken_ += (count * kFloats + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<Number*>(begin);
    }

    // In floats.
    int64_t taken() const { return taken_; }

  private:
    float* memory_;
    int64_t taken_ = 0;
};

}  // namespace fastattn
