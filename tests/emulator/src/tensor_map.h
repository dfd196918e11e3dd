// The tensor map: the 128 bytes that describe a tensor in global memory to the Tensor Memory Accelerator, and how a box
// of that tensor is cut out. PTX ISA, "Tensors"; CUDA Driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulator {

constexpr int kMostDimensions = 5;
constexpr int kTensorMapBytes = 128, kTensorMapAlignment = 64;

// In PTX's numbering (tensormap.replace), which is not the driver's.
enum class ElementType : uint8_t {
    kU8,
    kU16,
    kU32,
    kS32,
    kU64,
    kS64,
    kF16,
    kF32,
    kF32Ftz,
    kF64,
    kBF16,
    kTF32,
    kTF32Ftz
};
enum class Swizzle : uint8_t { kNone, k32B, k64B, k128B };
enum class Fill : uint8_t { kZero, kNaN };

// The real encoding is NVIDIA's secret, and nobody may rely on it; this is ours. All zeros but for the fields that
// Triton sets with tensormap.replace must be a valid map, so that 0 is the usual value of what it leaves out.
struct TensorMap {
    uint64_t address;
    uint64_t dims[kMostDimensions];         // elements, the contiguous dimension first; rank of them count
    uint64_t strides[kMostDimensions - 1];  // bytes, of dims[1] and on
    uint16_t box[kMostDimensions];          // elements that are spanned
    uint8_t element_strides[kMostDimensions];
    uint8_t last_dimension;  // the rank - 1
    ElementType type;
    uint8_t interleave;  // 0: none, all that is supported
    Swizzle swizzle;
    uint8_t promotion;  // of L2 fetches: without effect
    Fill fill;
    uint8_t reserved[27];  // 0

    int rank() const { return last_dimension + 1; }
    int element_bytes() const;
    // Elements of the box in shared memory: every element_strides-th is taken. Dimension 0 knows no such stride.
    int box_count(int dimension) const {
        const int stride = dimension == 0 ? 1 : element_strides[dimension];
        return (box[dimension] + stride - 1) / stride;
    }
    int row_bytes() const { return box[0] * element_bytes(); }
    int64_t box_bytes() const;
    // Why a tensor copy cannot use the map; empty if it can.
    std::string error() const;
};
static_assert(sizeof(TensorMap) == kTensorMapBytes);

constexpr int kInvalidValue = 1, kNotSupported = 801;  // of CUresult

// The driver's cuTensorMapEncodeTiled with its error codes, 0 if all is well; `reason` says in words what is wrong, or
// what is unusual, if anything.
int encode_tiled(void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
                 const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion,
                 int fill, std::string* reason = nullptr);

// A run of elements along dimension 0 of a box.
struct BoxRow {
    int64_t offset;    // of the row in the box, in bytes
    uint64_t address;  // of its first element inside of the tensor; none is if bytes == 0
    int before;        // bytes of the row that lie before the tensor
    int bytes;         // of the row inside of the tensor
};

// Calls `visit` for each row of the box that starts at these coordinates, in the order of shared memory.
void each_row(const TensorMap& map, const int32_t* coordinates, const std::function<void(const BoxRow&)>& visit);

// Where hardware puts the 16 bytes that would lie at a shared address: bits of the 128-byte line's number are xored
// into the number of the 16 bytes in the line.
inline uint32_t swizzled(Swizzle swizzle, uint32_t address) {
    const uint32_t mask = (1u << static_cast<int>(swizzle)) - 1;
    return address ^ ((address >> 7 & mask) << 4);
}

// A row as a load leaves it in shared memory: elements outside of the tensor are filled, and of those inside, some
// types are rounded on the way. `source` has the row's bytes inside of the tensor.
void complete_row(const TensorMap& map, const BoxRow& row, const std::byte* source, std::byte* out);

}  // namespace emulator
