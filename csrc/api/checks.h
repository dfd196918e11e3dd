// Checks what the host knows about tensors, such as shapes and dtypes. Each error names the argument, what was expected
// and what came. Also copies tensors whose rows cannot be loaded 16 bytes at a time.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/device.h"
#include "host/params.h"

namespace fastattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws "fastattn.<op>: <message>" unless the condition holds.
template <typename... Parts>
void check(bool condition, const char* op, const Parts&... message) {
    if (condition) return;
    std::ostringstream text;
    text << "fastattn." << op << ": ";
    (text << ... << message);
    throw std::runtime_error(text.str());
}

// Stands for a tensor's shape in an error's text. The text is made only if the error is thrown.
struct ShapeText {
    const Tensor& tensor;
};

inline ShapeText shape_text(const Tensor& tensor) {
    return {tensor};
}

inline std::ostream& operator<<(std::ostream& text, const ShapeText& shape) {
    text << '[';
    for (int64_t dim = 0; dim < shape.tensor.dim(); ++dim) text << (dim == 0 ? "" : ", ") << shape.tensor.size(dim);
    return text << ']';
}

// Returns the name of a dtype in Python, without "torch.".
inline const char* dtype_text(ScalarType dtype) {
    static constexpr std::pair<ScalarType, const char*> kNames[] = {
        {ScalarType::Half, "float16"},
        {ScalarType::BFloat16, "bfloat16"},
        {ScalarType::Float, "float32"},
        {ScalarType::Double, "float64"},
        {ScalarType::Char, "int8"},
        {ScalarType::Byte, "uint8"},
        {ScalarType::Short, "int16"},
        {ScalarType::Int, "int32"},
        {ScalarType::Long, "int64"},
        {ScalarType::Bool, "bool"},
        {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
    };
    for (const auto& [type, name] : kNames) {
        if (type == dtype) return name;
    }
    return torch::headeronly::toString(dtype);
}

inline const char* dtype_text(const Tensor& tensor) {
    return dtype_text(tensor.scalar_type());
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> expected) {
    bool equal = tensor.dim() == static_cast<int64_t>(expected.size());
    for (int64_t dim = 0; equal && dim < tensor.dim(); ++dim) equal = tensor.size(dim) == expected.begin()[dim];
    if (equal) return;
    std::ostringstream text;
    for (const int64_t size : expected) text << (text.tellp() == 0 ? "" : ", ") << size;
    check(false, op, name, " must have shape [", text.str(), "], got ", shape_text(tensor));
}

inline void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank) {
    check(tensor.dim() == rank, op, name, " must have ", rank, " dimensions, got shape ", shape_text(tensor));
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& like,
                         const char* like_name = "query") {
    if (are_on_one_device(tensor, like)) return;
    check(false, op, name, " must be on the device of ", like_name, ", which is ", device_text(like), ", got one on ",
          device_text(tensor));
}

inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& query) {
    check(tensor.scalar_type() == query.scalar_type(), op, name, " must have the dtype of query, ", dtype_text(query),
          ", got ", dtype_text(tensor), "; pass ", name, ".to(query.dtype)");
    check_device(op, name, tensor, query);
}

inline void check_int32(const char* op, const char* name, const Tensor& tensor, const Tensor& like,
                        const char* like_name = "query") {
    check(tensor.scalar_type() == ScalarType::Int, op, name, " must be int32, got ", dtype_text(tensor), "; pass ",
          name, ".int()");
    check_device(op, name, tensor, like, like_name);
}

inline void check_head_dim(const char* op, const char* name, const Tensor& tensor, int64_t most) {
    const int64_t head_dim = tensor.size(tensor.dim() - 1);
    check(head_dim > 0 && head_dim % 8 == 0 && head_dim <= most, op, name,
          " must have a last dim (head dim) that is a multiple of 8 up to ", most, ", got ", head_dim);
}

// Raises if an option is given that the native kernel of an op does not have.
inline void check_absent(const char* op, const char* name, const std::optional<Tensor>& tensor) {
    if (!tensor.has_value()) return;
    check(false, op, name,
          " must be None, because the native kernel does not support it in this call, got a tensor of shape ",
          shape_text(*tensor));
}

inline int32_t to_int32(const char* op, const char* name, int64_t value) {
    check(value >= 0 && value <= std::numeric_limits<int32_t>::max(), op, name,
          ": sizes must be at most 2147483647, got ", value);
    return static_cast<int32_t>(value);
}

// Returns a stride in elements, for kernels that keep strides in 32 bits. Returns 0 if the dimension has size 1.
inline uint32_t stride_in_elements(const char* op, const char* name, const Tensor& tensor, int64_t dim) {
    const int64_t elements = tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
    check(elements <= std::numeric_limits<uint32_t>::max(), op, name, " must have a stride below ",
          4 * tensor.element_size(), " GiB in dimension ", dim);
    return static_cast<uint32_t>(elements);
}

// Does the same in chunks of 16 bytes. The stride must be a multiple of 16 bytes.
inline uint32_t stride_in_chunks(const char* op, const char* name, const Tensor& tensor, int64_t dim) {
    constexpr int64_t kChunkBytes = 16;
    const int64_t chunks = tensor.size(dim) > 1 ? tensor.stride(dim) * tensor.element_size() / kChunkBytes : 0;
    check(chunks <= std::numeric_limits<uint32_t>::max(), op, name, " must have a stride below ", 4 * kChunkBytes,
          " GiB in dimension ", dim);
    return static_cast<uint32_t>(chunks);
}

inline DataType data_type(const char* op, const char* name, const Tensor& tensor) {
    const ScalarType dtype = tensor.scalar_type();
    check(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op, name,
          " must be float16 or bfloat16 for the native kernel, got ", dtype_text(tensor));
    return dtype == ScalarType::Half ? DataType::kFloat16 : DataType::kBFloat16;
}

inline constexpr const char* kAlignedRule =
    "its last dim must be contiguous, its rows must not overlap, and its address and strides must be multiples of 16 "
    "bytes";

// Returns whether kernels can read the rows 16 bytes at a time and by TMA. Rows must not overlap or repeat, because
// NVIDIA does not document that TMA allows this. A tensor of three dims holds packed sequences, [total, heads,
// head_dim]. python/fastattn/layout.py has the same rule.
inline bool is_aligned(const Tensor& tensor) {
    constexpr uint64_t kAlignment = 16;
    const int64_t last = tensor.dim() - 1, row_dim = tensor.dim() == 3 ? 0 : last - 1;
    if (tensor.size(last) > 1 && tensor.stride(last) != 1) return false;
    if (tensor.size(row_dim) > 1 && tensor.stride(row_dim) < tensor.size(last)) return false;
    if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment != 0) return false;
    for (int64_t dim = 0; dim < last; ++dim) {
        const uint64_t stride_bytes = static_cast<uint64_t>(tensor.stride(dim)) * tensor.element_size();
        if (tensor.size(dim) > 1 && stride_bytes % kAlignment != 0) return false;
    }
    return true;
}

// Returns the tensor itself if it is aligned, else a contiguous copy, which the allocator aligns.
inline Tensor aligned(const Tensor& tensor) {
    if (tensor.numel() == 0 || is_aligned(tensor)) return tensor;
    Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
    return torch::stable::copy_(copy, tensor);
}

// How a tensor holds sequences: dense as [batch, heads, rows, head_dim], or packed as [total, heads, head_dim]. For
// packed sequences, `rows` is an upper bound of all lengths.
struct Sequences {
    bool are_packed;
    int64_t batch, rows;
};

// Returns the view by which a kernel reads or writes an aligned tensor.
template <typename Element>
HeadsView<Element> heads_view(const char* op, const char* name, const Tensor& tensor, const Sequences& sequences) {
    HeadsView<Element> view;
    view.data = static_cast<Element*>(tensor.data_ptr());
    view.batch = to_int32(op, name, sequences.batch);
    view.heads = to_int32(op, name, tensor.size(1));
    view.rows = to_int32(op, name, sequences.rows);
    view.head_dim = to_int32(op, name, tensor.size(tensor.dim() - 1));
    view.batch_stride = sequences.are_packed ? 0 : tensor.stride(0);
    view.head_stride = tensor.stride(1);
    const int64_t row_dim = sequences.are_packed ? 0 : 2;
    // The stride of a single row may be any number. Kernels compute the addresses of the tile's other rows, which they
    // do not read, with it, and copies of 16 bytes need aligned addresses even so.
    view.row_stride = tensor.size(row_dim) > 1 ? tensor.stride(row_dim) : 0;
    return view;
}

}  // namespace fastattn
