// Fills the rows of packed results that lie outside of all sequences, which attention kernels do not write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "api/device.h"
#include "attention/outside_rows.h"
#include "host/device_facts.h"

namespace fastattn {

// Describes a packed tensor whose rows outside of sequences will become zero.
template <typename Element>
OutsideRowsParams::PackedTensor to_zero_outside(const HeadsView<Element>& view, const int32_t* cu_seqlens,
                                                int32_t total) {
    constexpr int32_t kBytes = sizeof(Element);
    return {reinterpret_cast<char*>(view.data),
            cu_seqlens,
            view.batch,
            total,
            /*max_seqlen=*/view.rows,
            view.heads,
            view.head_dim * kBytes / OutsideRowsParams::kChunkBytes,
            view.row_stride * kBytes,
            view.head_stride * kBytes};
}

inline void fill_outside_rows(std::initializer_list<OutsideRowsParams::PackedTensor> tensors, const RowsView& lse,
                              const DeviceFacts& facts, Stream stream) {
    constexpr int32_t kCtasPerSm = 8;
    OutsideRowsParams params{};
    params.num_ctas = 1;
    for (const OutsideRowsParams::PackedTensor& tensor : tensors) {
        params.tensors[params.num_tensors++] = tensor;
        params.num_ctas = std::max(params.num_ctas, tensor.total);  // a CTA fills whole rows
    }
    params.num_ctas = std::min(params.num_ctas, kCtasPerSm * facts.num_sms);
    params.lse = lse;
    attention_outside_rows_kernels().find(facts.compute_capability, 0, std::nullopt, false).launch(params, stream);
}

}  // namespace fastattn
