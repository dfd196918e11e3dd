// Sums over the lanes of a warp, and broadcasts from one lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/fragment.cuh"

namespace fastattn {

// Returns the sum over all lanes of a warp, the same in every lane.
FASTATTN_DEVICE float warp_reduce_sum(float value) {
#pragma unroll
    for (int other = kWarpSize / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffff, value, other);
    return value;
}

// Returns the value of lane `lane` to all lanes. Words of 64 bits are passed whole, because ptxas spills registers if a
// pointer is passed in halves.
template <typename Value>
FASTATTN_DEVICE Value from_lane(Value value, int lane) {
    using Word = std::conditional_t<sizeof(Value) % sizeof(uint64_t) == 0, unsigned long long, unsigned>;
    static_assert(sizeof(Value) % sizeof(Word) == 0 && std::has_unique_object_representations_v<Value>);
    Word words[sizeof(Value) / sizeof(Word)];
    memcpy(words, &value, sizeof(Value));
#pragma unroll
    for (Word& word : words) word = __shfl_sync(0xffffffff, word, lane);
    memcpy(&value, words, sizeof(Value));
    return value;
}

// Returns the sum of lanes 0 … i to lane i.
FASTATTN_DEVICE int64_t warp_inclusive_sum(int64_t value, int lane) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int64_t before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

}  // namespace fastattn
