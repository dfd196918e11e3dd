// Allocates the workspaces of kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <stdexcept>

#include "api/attention_arguments.h"
#include "host/kernel_table.h"
#include "host/params.h"
#include "scheduler/launch_id.h"

namespace fastattn {

// Divides one tensor's memory among several arrays, because each allocation costs host time at every call.
class WorkspaceArena {
  public:
    explicit WorkspaceArena(float* memory) : memory_(memory) {}

    // Returns an array of `count` numbers, aligned to 128 bytes; null if the arena has no memory or `count` is 0.
    template <typename Number = float>
    Number* take(int64_t count) {
        static_assert(sizeof(Number) % sizeof(float) == 0 && alignof(Number) <= 128);
        constexpr int64_t kAlignment = 128 / sizeof(float), kFloats = sizeof(Number) / sizeof(float);
        float* const begin = memory_ != nullptr && count > 0 ? memory_ + taken_ : nullptr;
        taken_ += ceil_div(count * kFloats, kAlignment) * kAlignment;
        return reinterpret_cast<Number*>(begin);
    }

    // Returns the number of floats in all arrays taken so far.
    int64_t taken() const { return taken_; }

    // Returns the memory of all arrays taken so far.
    WorkspaceMemory taken_memory() const { return {memory_, taken_}; }

  private:
    float* memory_;
    int64_t taken_ = 0;
};

// Allocates the arrays that take(arena) takes. Calls take() twice: first without memory, to learn the size, then with
// memory.
template <typename Take>
Tensor make_workspace(const Tensor& query, Take&& take) {
    WorkspaceArena sizes(nullptr);
    take(sizes);
    Tensor workspace = torch::stable::new_empty(query, {sizes.taken()}, ScalarType::Float);
    WorkspaceArena arena(static_cast<float*>(workspace.data_ptr()));
    take(arena);
    return workspace;
}

// Fills `seen` and allocates its memory, `pitch` numbers for each tile of rows. Returns the tensor that holds this
// memory, and which must live until the kernels are launched.
inline Tensor make_seen_tiles(SeenTiles& seen, const KeyRangesView& ranges, const Tensor& query,
                              const AttentionSizes& sizes, const TileFacts& tile, int32_t num_key_tiles,
                              int32_t pitch) {
    if (tile.block_m > kMostRowsWithRanges)
        throw std::logic_error("fastattn: a tile has more than kMostRowsWithRanges rows");
    const int64_t num_tiles = sizes.is_packed ? first_packed_tile(sizes.batch, query.size(0), tile.block_m)
                                              : ceil_div(sizes.rows, int64_t{tile.block_m});
    const int64_t of_head = num_tiles * pitch, of_batch = ranges.heads * of_head;
    const bool shares_batch = sizes.is_packed || ranges.batch == 1;
    seen = {/*data=*/nullptr,
            tile.block_m,
            tile.block_n,
            num_key_tiles,
            pitch,
            sizes.is_packed,
            shares_batch ? 0 : of_batch,
            ranges.heads == 1 ? 0 : of_head};
    return make_workspace(query, [&](WorkspaceArena& arena) {
        seen.data = arena.take<int32_t>(shares_batch ? of_batch : ranges.batch * of_batch);
    });
}

// Allocates memory for partials of `rows` rows and for arrival counters. Returns the tensor that holds this memory, and
// which must live until the kernel is launched.
inline Tensor make_partial_workspace(PartialWorkspace& partials, const Tensor& query, int64_t rows, int64_t value_dim,
                                     int64_t counters) {
    partials.launch_id = launch_id();
    return make_workspace(query, [&](WorkspaceArena& arena) {
        partials.values = arena.take(rows * value_dim);
        partials.sums = arena.take(rows * 2);
        partials.arrivals = arena.take<uint64_t>(counters);
    });
}

}  // namespace fastattn
