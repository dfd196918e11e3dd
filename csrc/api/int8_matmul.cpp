// Checks the arguments of fastattn::int8_matmul and int8_matmul_grad_input, and launches the kernels they need.

#include "api/int8_matmul.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/checks.h"
#include "api/dequantised_matmul.h"
#include "api/device.h"
#include "api/kernel_choice.h"
#include "host/device_facts.h"
#include "int8_matmul/int8_matmul.h"
#include "scheduler/launch_id.h"
#include "scheduler/stream_k.h"

namespace fastattn {
namespace {

Activation activation_named(const char* op, const std::string& name) {
    constexpr std::array<std::pair<const char*, Activation>, 6> kActivations{{{"none", Activation::kNone},
                                                                              {"relu", Activation::kRelu},
                                                                              {"gelu", Activation::kGelu},
                                                                              {"gelu_tanh", Activation::kGeluTanh},
                                                                              {"silu", Activation::kSilu},
                                                                              {"swiglu", Activation::kSwiglu}}};
    for (const auto& [known, activation] : kActivations) {
        if (name == known) return activation;
    }
    check(false, op, "activation must be none, relu, gelu, gelu_tanh, silu or swiglu, got ", name);
    return Activation::kNone;
}

void check_dtype_and_device(const char* op, const char* name, const Tensor& tensor, const char* input_name,
                            const Tensor& input, ScalarType dtype) {
    check(tensor.scalar_type() == dtype, op, name, " must be ", dtype_text(dtype), ", got ", dtype_text(tensor));
    check_device(op, name, tensor, input, input_name);
}

// Returns the sizes of a result [..., columns] for an input [..., K].
std::vector<int64_t> with_columns(const Tensor& input, int64_t columns) {
    std::vector<int64_t> sizes;
    for (int64_t dim = 0; dim + 1 < input.dim(); ++dim) sizes.push_back(input.size(dim));
    sizes.push_back(columns);
    return sizes;
}

void check_sizes(const char* op, const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
    bool equal = tensor.dim() == static_cast<int64_t>(expected.size());
    for (size_t dim = 0; equal && dim < expected.size(); ++dim) {
        equal = tensor.size(static_cast<int64_t>(dim)) == expected[dim];
    }
    check(equal, op, name, " must have the leading dimensions of x and ", expected.back(), " columns, got ",
          shape_text(tensor));
}

// Returns a tensor [..., columns] as [rows, columns]. Copies it only if no view has this shape.
Tensor as_matrix(const Tensor& tensor) {
    const int64_t columns = tensor.size(tensor.dim() - 1);
    return torch::stable::reshape(tensor, {columns == 0 ? 0 : tensor.numel() / columns, columns});
}

// Returns the matrix itself if its rows are contiguous, else a copy.
Tensor with_contiguous_rows(const Tensor& matrix) {
    return matrix.size(1) <= 1 || matrix.stride(1) == 1 ? matrix : torch::stable::contiguous(matrix);
}

// Returns the matrix itself if its rows are aligned, else a copy with rows padded to 16 bytes.
Tensor with_aligned_rows(const Tensor& matrix) {
    if (matrix.numel() == 0 || is_aligned(matrix)) return matrix;
    const int32_t per_chunk = 16 / static_cast<int32_t>(matrix.element_size());
    const int64_t columns = matrix.size(1), room = ceil_div(columns, per_chunk) * per_chunk;
    Tensor rows = torch::stable::new_empty(matrix, {matrix.size(0), room});
    Tensor copy = torch::stable::narrow(rows, 1, 0, columns);
    return torch::stable::copy_(copy, matrix);
}

// Returns the stride between rows in elements. For a single row it is 0, so that the addresses that kernels compute for
// rows past the end are aligned too.
int64_t row_stride(const Tensor& matrix) {
    return matrix.size(0) > 1 ? matrix.stride(0) : 0;
}

template <typename Element>
MatrixView<Element> matrix_view(const char* op, const char* name, const Tensor& matrix) {
    return {static_cast<Element*>(matrix.data_ptr()), to_int32(op, name, matrix.size(0)),
            to_int32(op, name, matrix.size(1)), row_stride(matrix)};
}

// Tensors that must live until the kernels are launched, since views point into them.
struct Int8MatmulTensors {
    Tensor input, weight, scale, out;
    std::optional<Tensor> bias{}, residual{}, partial{}, arrivals{}, token_partial{}, token_arrivals{};
    std::optional<Tensor> tokens{}, token_scale{}, counters{};
};

Int8WeightView weight_view(const char* op, Int8MatmulTensors& tensors) {
    constexpr int64_t kMostColumns = int64_t{1} << 29;  // kernels count the bytes of a row of x in 32 bits
    const int64_t rows = tensors.weight.size(0), columns = tensors.weight.size(1);
    const int64_t groups = tensors.scale.size(1), scale_rows = tensors.scale.size(0);
    check(rows <= kMostColumns && columns <= kMostColumns, op,
          "weight must have at most 2^29 rows and at most 2^29 columns, got ", shape_text(tensors.weight));
    int32_t group_shift = Int8WeightView::kOneGroup;
    if (groups > 1) {
        group_shift = 0;
        while (group_shift < 3 && groups * (Int8WeightView::kSmallestGroup << group_shift) != columns) ++group_shift;
        check(group_shift < 3 && scale_rows == rows, op, "scale must have a row for each row and a column for each ",
              "32, 64 or 128 columns of weight, got ", shape_text(tensors.scale), " for weight ",
              shape_text(tensors.weight));
    } else {
        check(groups == 1 && (scale_rows == 1 || scale_rows == rows), op, "scale must have shape [1, 1], [", rows,
              ", 1] or [", rows, ", groups], got ", shape_text(tensors.scale));
    }
    tensors.weight = with_aligned_rows(tensors.weight);
    tensors.scale = torch::stable::contiguous(tensors.scale);
    return {static_cast<const int8_t*>(tensors.weight.data_ptr()),
            to_int32(op, "weight", rows),
            to_int32(op, "weight", columns),
            row_stride(tensors.weight),
            static_cast<const float*>(tensors.scale.data_ptr()),
            scale_rows == 1 && rows != 1 ? 0 : static_cast<int32_t>(groups),
            static_cast<int32_t>(groups),
            group_shift};
}

void check_arguments(const char* op, const char* input_name, const Tensor& input, const Tensor& weight,
                     const Tensor& scale, int64_t weight_dim) {
    check_rank(op, "weight", weight, 2);
    check_rank(op, "scale", scale, 2);
    const int64_t width = weight.size(weight_dim);
    check(input.dim() >= 1 && input.size(input.dim() - 1) == width, op, input_name, " must have ", width,
          " columns (its last dim) to match weight, got ", shape_text(input));
    check_dtype_and_device(op, "weight", weight, input_name, input, ScalarType::Char);
    check_dtype_and_device(op, "scale", scale, input_name, input, ScalarType::Float);
}

// Checks what kernels for int8 activations require beyond check_arguments().
void check_for_int8_activations(const char* op, const Tensor& weight, const MatmulEpilogue& epilogue) {
    const int64_t rows = weight.size(0), columns = weight.size(1);
    check(!epilogue.is_gated(), op, "activation must not be swiglu with int8 activations");
    check(rows % 8 == 0 && columns % 16 == 0 && columns <= kMostInt8SumK, op, "weight must have a multiple of 8 ",
          "rows and a multiple of 16 columns, at most ", kMostInt8SumK, ", for int8 activations, got ",
          shape_text(weight));
}

Int8Choice choose(Int8KernelTable& kernels, DataType dtype, const Int8MatmulParams& params, bool is_plain,
                  bool sums_tokens = false) {
    const DeviceFacts facts = device_facts();
    const Int8Traits traits{dtype, params.weight.group_shift != Int8WeightView::kOneGroup, is_plain, sums_tokens};
    return int8_kernel(kernels, facts.compute_capability, facts.num_sms, traits, params.input.rows,
                       params.epilogue.sum_columns(), params.input.columns);
}

// Fills the schedule, allocates the workspace for partials and arrival counters, and returns the kernel.
Int8KernelTable::Row& schedule_work(const Int8Choice& chosen, Int8MatmulParams& params, Int8MatmulTensors& tensors) {
    MatmulEpilogue& epilogue = params.epilogue;
    const auto& [_, tile, schedule, clocks] = chosen.choice;
    epilogue.schedule = schedule;
    epilogue.launch_id = launch_id();
    if (schedule.num_splits > 0) {
        tensors.arrivals =
            torch::stable::new_empty(tensors.input, {schedule.num_split_tiles, tile.cluster_size}, ScalarType::Long);
        tensors.partial = torch::stable::new_empty(
            tensors.input, {num_workspace_slots(schedule), tile.block_m, tile.block_n}, ScalarType::Float);
        epilogue.partial = static_cast<float*>(tensors.partial->data_ptr());
        epilogue.arrivals = static_cast<uint64_t*>(tensors.arrivals->data_ptr());
    }
    if (params.token_sums.out != nullptr && schedule.m_tiles > 1) {
        const int32_t columns = schedule.n_tiles * tile.cluster_size;
        const int64_t counted_steps = tile.uses_wgmma ? ceil_div(schedule.steps, columns) : 1;  // arrivals per m tile
        check(schedule.m_tiles * counted_steps <= int64_t{1} << kLaunchCountBits, "int8_matmul_grad_input",
              "grad_out has too many rows for bias_grad=True; split it into smaller batches; got ", params.input.rows);
        tensors.token_arrivals = torch::stable::new_empty(tensors.input, {columns}, ScalarType::Long);
        tensors.token_partial =
            torch::stable::new_empty(tensors.input, {schedule.m_tiles, params.token_sums.columns}, ScalarType::Float);
        params.token_sums.partial = static_cast<float*>(tensors.token_partial->data_ptr());
        params.token_sums.arrivals = static_cast<uint64_t*>(tensors.token_arrivals->data_ptr());
    }
    return *chosen.kernel;
}

// Returns dY summed over its rows by PyTorch, in dY's dtype even under autocast. Returns [0] unless is_wanted.
Tensor bias_gradient(const Tensor& grad_out, bool is_wanted) {
    if (!is_wanted) return torch::stable::new_empty(grad_out, {0});
    return torch::stable::sum(grad_out, std::array<int64_t, 1>{0}, /*keepdim=*/false, grad_out.scalar_type());
}

// Returns whether the kernel needs int8 tokens from a kernel before it. Other kernels quantise tokens themselves.
bool takes_quantized(const MatmulTile& tile) {
    return tile.uses_wgmma;
}

// Allocates memory for int8 tokens and their scales, which a kernel before the matmul writes, or all CTAs of the matmul
// together. Allocates nothing if each CTA quantises for itself.
void make_room_for_tokens(const char* op, const MatmulTile& tile, Int8MatmulParams& params,
                          Int8MatmulTensors& tensors) {
    const MatrixView<const uint16_t>& input = params.input;
    const MatmulSchedule& schedule = params.epilogue.schedule;
    if (!takes_quantized(tile)) {
        if (each_cta_quantises(tile.block_m, input.rows, input.columns)) return;
        check(input.rows + 2 * num_ctas(schedule) < int64_t{1} << kLaunchCountBits, op,
              "x and weight have too many rows ", "for int8 activations; split x into smaller batches; got ",
              input.rows, " and ", params.weight.rows);
    }
    const auto empty = [&](int64_t elements, ScalarType type) {
        return torch::stable::new_empty(tensors.input, {elements}, type);
    };
    tensors.tokens = empty(int64_t{input.rows} * input.columns, ScalarType::Char);
    tensors.token_scale = empty(input.rows, ScalarType::Float);
    tensors.counters = empty(takes_quantized(tile) ? 0 : 1 + schedule.m_tiles, ScalarType::Long);
    auto* queue = static_cast<uint64_t*>(tensors.counters->data_ptr());
    params.quantized = {static_cast<int8_t*>(tensors.tokens->data_ptr()),
                        static_cast<float*>(tensors.token_scale->data_ptr()), queue, queue + 1,
                        params.epilogue.launch_id};
}

}  // namespace

Tensor int8_matmul(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::string activation, bool int8_activations) {
    constexpr const char* kOp = "int8_matmul";
    check_arguments(kOp, "x", x, weight, scale, /*weight_dim=*/1);
    const DataType dtype = data_type(kOp, "x", x);
    Int8MatmulParams params{};
    MatmulEpilogue& epilogue = params.epilogue;
    epilogue.activation = activation_named(kOp, activation);
    if (int8_activations) check_for_int8_activations(kOp, weight, epilogue);
    const int64_t weight_rows = weight.size(0), columns = epilogue.is_gated() ? weight_rows / 2 : weight_rows;
    check(!epilogue.is_gated() || weight_rows % 2 == 0, kOp,
          "weight must have an even number of rows for swiglu (first gates, then ups), got ", shape_text(weight));
    const std::vector<int64_t> sizes = with_columns(x, columns);
    if (bias.has_value()) {
        check_shape(kOp, "bias", *bias, {weight_rows});
        check_dtype_and_device(kOp, "bias", *bias, "x", x, x.scalar_type());
    }
    if (residual.has_value()) {
        check_sizes(kOp, "residual", *residual, sizes);
        check_dtype_and_device(kOp, "residual", *residual, "x", x, x.scalar_type());
    }

    Int8MatmulTensors tensors{x, weight, scale, torch::stable::new_empty(x, sizes), bias, residual};
    params.weight = weight_view(kOp, tensors);
    if (tensors.out.numel() == 0) return tensors.out;
    const int64_t rows = tensors.out.numel() / columns;
    tensors.input = x.numel() == 0 ? torch::stable::reshape(x, {rows, 0}) : with_aligned_rows(as_matrix(x));
    params.input = matrix_view<const uint16_t>(kOp, "x", tensors.input);
    epilogue.out = matrix_view<uint16_t>(kOp, "out", torch::stable::reshape(tensors.out, {rows, columns}));
    if (params.weight.group_shift == Int8WeightView::kOneGroup && !int8_activations) {
        epilogue.scale = params.weight.scale;
        epilogue.scale_stride = params.weight.scale_row_stride;
    }
    if (bias.has_value()) {
        tensors.bias = torch::stable::contiguous(*bias);
        epilogue.bias = static_cast<const uint16_t*>(tensors.bias->data_ptr());
    }
    if (residual.has_value()) {
        tensors.residual = with_contiguous_rows(as_matrix(*residual));
        epilogue.residual = matrix_view<const uint16_t>(kOp, "residual", *tensors.residual);
    }
    const OnDeviceOf device(tensors.input);
    const bool is_plain = !bias.has_value() && !residual.has_value() && epilogue.activation == Activation::kNone;
    const Int8Choice chosen = choose(int8_activations ? int8_matmul_s8_kernels() : int8_matmul_kernels(), dtype, params,
                                     is_plain && !int8_activations);
    if (chosen.dequantises) {
        const Tensor out = torch::stable::reshape(tensors.out, {rows, columns});
        multiply_dequantised(params.weight, dtype, tensors.input, out, /*is_transposed=*/true, device.stream());
        return tensors.out;
    }
    auto& kernel = schedule_work(chosen, params, tensors);
    if (int8_activations) {
        const MatmulTile& tile = kernel.tile.matmul;
        make_room_for_tokens(kOp, tile, params, tensors);
        if (takes_quantized(tile)) {
            int8_quantize_tokens_kernels()
                .find(device_facts().compute_capability, 0, dtype, /*flag=*/false)
                .launch(params, device.stream());
        }
    }
    kernel.launch(params, device.stream());
    return tensors.out;
}

std::tuple<Tensor, Tensor> int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale, bool bias_grad) {
    constexpr const char* kOp = "int8_matmul_grad_input";
    check_arguments(kOp, "grad_out", grad_out, weight, scale, /*weight_dim=*/0);
    const DataType dtype = data_type(kOp, "grad_out", grad_out);
    const int64_t N = weight.size(0), columns = weight.size(1);

    Int8MatmulTensors tensors{grad_out, weight, scale,
                              torch::stable::new_empty(grad_out, with_columns(grad_out, columns))};
    Int8MatmulParams params{};
    params.weight = weight_view(kOp, tensors);
    if (grad_out.numel() == 0) {
        return {torch::stable::zero_(tensors.out), torch::stable::new_zeros(grad_out, {bias_grad ? N : 0})};
    }
    const int64_t rows = grad_out.numel() / N;
    if (columns == 0) {  // no output tile, so no CTA that would sum tokens
        return {tensors.out, bias_gradient(torch::stable::reshape(grad_out, {rows, N}), bias_grad)};
    }
    tensors.input = with_aligned_rows(as_matrix(grad_out));
    params.input = matrix_view<const uint16_t>(kOp, "grad_out", tensors.input);
    const Tensor out = torch::stable::reshape(tensors.out, {rows, columns});
    params.epilogue.out = matrix_view<uint16_t>(kOp, "out", out);
    const OnDeviceOf device(tensors.input);
    const Int8Choice chosen = choose(int8_matmul_grad_input_kernels(), dtype, params, /*is_plain=*/true, bias_grad);
    if (chosen.dequantises) {
        multiply_dequantised(params.weight, dtype, tensors.input, out, /*is_transposed=*/false, device.stream());
        return {tensors.out, bias_gradient(tensors.input, bias_grad)};
    }
    Tensor grad_bias = torch::stable::new_empty(grad_out, {0});
    if (bias_grad) {
        // Rounds up to whole chunks; the sums past the last column of dY are zero.
        params.token_sums.columns = ceil_div(params.weight.rows, kEpilogueColumns) * kEpilogueColumns;
        grad_bias = torch::stable::new_empty(grad_out, {params.token_sums.columns});
        params.token_sums.out = static_cast<uint16_t*>(grad_bias.data_ptr());
        grad_bias = torch::stable::narrow(grad_bias, 0, 0, N);
    }
    schedule_work(chosen, params, tensors).launch(params, device.stream());
    return {tensors.out, grad_bias};
}

}  // namespace fastattn
