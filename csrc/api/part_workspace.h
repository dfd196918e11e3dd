// Allocates what device/part_slots.cuh and device/arrivals.cuh work in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "api/checks.h"
#include "api/dealer.h"
#include "host/launch_token.h"
#include "host/params.h"

namespace fastattn {

// Of so many rows and counters, for one launch: the pointers go into `parts`. The tensor has to live until the kernel is
// started.
inline Tensor make_part_workspace(PartWorkspace& parts, const Tensor& query, int64_t rows, int64_t value_dim,
                                  int64_t counters) {
    const auto deal = [&](float* memory) {
        Dealer dealer(memory);
        parts.values = dealer.take(rows * value_dim);
        parts.sums = dealer.take(rows * 2);
        parts.arrivals = dealer.take<uint64_t>(counters);
        return dealer.taken();
    };
    Tensor workspace = torch::stable::new_empty(query, {deal(nullptr)}, ScalarType::Float);
    deal(static_cast<float*>(workspace.data_ptr()));
    parts.token = launch_token();
    return workspace;
}

}  // namespace fastattn
