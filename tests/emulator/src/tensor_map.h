// The tensor map: the 128 bytes that describe a tensor in global memory to the Tensor Memory Accelerator, and the rows
// of a box of that tensor. PTX ISA, "Tensors"; CUDA Driver API, cuTensorMapEncodeTiled.
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

// The emulator's own encoding, because NVIDIA does not publish the real one. Triton starts from 128 zero bytes and sets
// only some fields with tensormap.replace, so that 0 must be the usual value of every other field.
struct TensorMap {
    uint64_t address;
    uint64_t dims[kMostDimensions];         // sizes in elements, the contiguous dimension first
    uint64_t strides[kMostDimensions - 1];  // in bytes, from dims[1] on
    uint16_t box[kMostDimensions];          // elements that the box spans
    uint8_t element_strides[kMostDimensions];
    uint8_t last_dimension;  // rank - 1
    ElementType type;
    uint8_t interleave;  // 0: none; nothing else is supported
    Swizzle swizzle;
    uint8_t promotion;  // of L2 fetches; has no effect
    Fill fill;
    uint8_t reserved[27];  // 0

    int rank() const { return last_dimension + 1; }
    int element_bytes() const;
    // Returns the size of the box in shared memory: every element_strides-th element, but in dimension 0 all of them.
    int box_count(int dimension) const {
        const int stride = dimension == 0 ? 1 : element_strides[dimension];
        return (box[dimension] + stride - 1) / stride;
    }
    int row_bytes() const { return box[0] * element_bytes(); }
    int64_t box_bytes() const;
    // Returns why a tensor copy cannot use the map, or an empty string.
    std::string error() const;
};
static_assert(sizeof(TensorMap) == kTensorMapBytes);

constexpr int kInvalidValue = 1, kNotSupported = 801;  // values of CUresult

// The driver's cuTensorMapEncodeTiled. Returns its CUresult, 0 for success. `reason` gets the cause of an error, or a
// warning about an unusual map.
int encode_tiled(void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
                 const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion,
                 int fill, std::string* reason = nullptr);

// A run of elements along dimension 0 of a box.
struct BoxRow {
    int64_t offset;    // of the row in the box, in bytes
    uint64_t address;  // of its first element inside the tensor; undefined if bytes == 0
    int before;        // bytes of the row that lie before the tensor
    int bytes;         // bytes of the row inside the tensor
};

// Calls `visit` for each row of the box that starts at `coordinates`, in the order of shared memory.
void each_row(const TensorMap& map, const int32_t* coordinates, const std::function<void(const BoxRow&)>& visit);

// Returns the shared address at which hardware stores the 16-byte chunk that would lie at `address` without a swizzle.
// The number of the chunk in its 128-byte row is xored with the low bits of the row's number.
inline uint32_t swizzled(Swizzle swizzle, uint32_t address) {
    const uint32_t mask = (1u << static_cast<int>(swizzle)) - 1;
    return address ^ ((address >> 7 & mask) << 4);
}

// Writes a row to `out` as a load leaves it in shared memory: elements outside the tensor are filled, and those inside
// are rounded if their type requires it. `source` has the row's bytes inside the tensor.
void complete_row(const TensorMap& map, const BoxRow& row, const std::byte* source, std::byte* out);

}  // namespace emulator
