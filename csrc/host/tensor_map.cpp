#include "host/tensor_map.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "host/driver.h"

namespace fastattn {
namespace {

// Returns the driver's function, looked up once. Every driver of a GPU with TMA has it.
auto* encode_tiled_function() {
    static auto* const function =
        reinterpret_cast<decltype(cuTensorMapEncodeTiled)*>(driver_function("cuTensorMapEncodeTiled"));
    return function;
}

// Returns the stride of a dimension for the driver. The stride of a dimension of size 1 has no effect, but the driver
// may demand that it is not smaller than the inner dimensions. So inner_bytes, a multiple of 16, replaces it.
cuuint64_t map_stride(cuuint64_t size, int64_t bytes, int64_t inner_bytes) {
    constexpr int64_t kMostBytes = (int64_t{1} << 40) - 16;
    return static_cast<cuuint64_t>(size > 1 ? bytes : std::min(inner_bytes, kMostBytes));
}

// Returns the swizzle of boxes whose rows have row_bytes bytes.
CUtensorMapSwizzle swizzle_of(int32_t row_bytes) {
    if (row_bytes == 128) return CU_TENSOR_MAP_SWIZZLE_128B;
    if (row_bytes == 64) return CU_TENSOR_MAP_SWIZZLE_64B;
    throw std::runtime_error("fastattn: no swizzle has lines of that length");
}

}  // namespace

MatrixMap matrix_map(const void* data, int32_t element_bytes, int32_t rows, int32_t columns, int64_t row_bytes,
                     int32_t box_rows, int32_t box_columns) {
    MatrixMap map{};
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const int64_t own_bytes = (int64_t{columns} * element_bytes + 15) / 16 * 16;
    const cuuint64_t strides[] = {map_stride(sizes[1], row_bytes, own_bytes)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t element_strides[] = {1, 1};
    const CUresult result = encode_tiled_function()(
        &map.encoded, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
        const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle_of(box_columns * element_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("fastattn: the CUDA driver refuses a tensor map of [" + std::to_string(rows) + ", " +
                                 std::to_string(columns) + "] with rows " + std::to_string(row_bytes) +
                                 " bytes apart: error " + std::to_string(result));
    }
    return map;
}

TensorMap tensor_map(const HeadsView<const uint16_t>& view, int32_t rows, int32_t group, int32_t box_rows,
                     int32_t box_columns, DataType dtype) {
    TensorMap map{};
    if (rows == 0) return map;  // nothing is copied, and there may be no memory
    map.has_groups = view.head_stride != 0 && view.heads > group;
    map.has_batch = view.batch_stride != 0 && view.batch > 1;
    const auto size_of = [](int32_t size, bool counts = true) { return counts ? static_cast<cuuint64_t>(size) : 1; };
    const cuuint64_t sizes[] = {size_of(view.head_dim), size_of(group), size_of(rows),
                                size_of(view.heads / group, map.has_groups), size_of(view.batch, map.has_batch)};
    const int64_t elements_apart[] = {view.head_stride, view.row_stride, view.head_stride * group, view.batch_stride};
    cuuint64_t strides[4];
    int64_t inner_bytes = (int64_t{view.head_dim} * 2 + 15) / 16 * 16;
    for (int i = 0; i < 4; ++i) {
        strides[i] = map_stride(sizes[i + 1], elements_apart[i] * 2, inner_bytes);
        inner_bytes = std::max(inner_bytes, static_cast<int64_t>(strides[i] * sizes[i + 1]));
    }
    const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(group),
                              static_cast<cuuint32_t>(box_rows), 1, 1};
    const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
    const CUresult result = encode_tiled_function()(
        &map.encoded, dtype == DataType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        5, const_cast<uint16_t*>(view.data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle_of(box_columns * 2), CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error("fastattn: the CUDA driver refuses a tensor map of [" + std::to_string(view.batch) +
                                 ", " + std::to_string(view.heads) + ", " + std::to_string(rows) + ", " +
                                 std::to_string(view.head_dim) + "] with strides " + std::to_string(view.batch_stride) +
                                 ", " + std::to_string(view.head_stride) + ", " + std::to_string(view.row_stride) +
                                 ": error " + std::to_string(result));
    }
    return map;
}

}  // namespace fastattn
