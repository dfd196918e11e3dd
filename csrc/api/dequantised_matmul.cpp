// Multiplies by dequantised weights: our kernel converts a block of them to 16-bit floats, and aten::mm.out multiplies.

#include "api/dequantised_matmul.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>

#include "host/device_facts.h"
#include "int8_matmul/ways.h"

namespace fastattn {
namespace {

using torch::stable::Tensor;

// Computes out = a · b, where `out` may be some columns of a larger matrix.
void mm_out(const Tensor& a, const Tensor& b, const Tensor& out) {
    std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                      torch::stable::detail::from(out)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // releases the result's reference to `out`
}

}  // namespace

void multiply_dequantised(const Int8WeightView& weight, DataType dtype, const Tensor& input, Tensor out,
                          bool is_transposed, Stream stream) {
    auto& kernel = int8_dequantize_weight_kernels().find(device_facts().compute_capability, 0, dtype, false);
    const int32_t count = is_transposed ? weight.rows : weight.columns;  // columns of the result
    const int32_t elements = is_transposed ? weight.columns : weight.rows;
    const int32_t block = dequantised_block(count, elements);
    std::optional<Tensor> room;
    for (int32_t first = 0; first < count; first += block) {
        const int32_t here = std::min(block, count - first);
        DequantizeWeightParams params{weight, 0, weight.rows, 0, weight.columns, nullptr, 0};
        (is_transposed ? params.first_row : params.first_column) = first;
        (is_transposed ? params.rows : params.columns) = here;
        params.out_stride = dequantised_stride(params.columns);
        const int64_t elements_here = params.rows * params.out_stride;
        if (!room) room = torch::stable::new_empty(input, {elements_here});  // later blocks are no larger
        params.out = static_cast<uint16_t*>(room->data_ptr());
        kernel.launch(params, stream);
        Tensor rows =
            torch::stable::reshape(torch::stable::narrow(*room, 0, 0, elements_here), {params.rows, params.out_stride});
        const Tensor dequantised = torch::stable::narrow(rows, 1, 0, params.columns);
        mm_out(input, is_transposed ? torch::stable::transpose(dequantised, 0, 1) : dequantised,
               torch::stable::narrow(out, 1, first, here));
    }
}

}  // namespace fastattn
