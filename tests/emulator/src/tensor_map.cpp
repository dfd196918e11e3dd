#include "tensor_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "families/floating.h"

namespace emulator {
namespace {

constexpr int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
constexpr uint64_t kMostStride = uint64_t{1} << 40, kMostDim = uint64_t{1} << 32;
constexpr int kMostBox = 256, kMostElementStride = 8;

// In the order of CUtensorMapDataType. Its last three values (packed 4- and 6-bit elements) need sm_100.
constexpr ElementType kDriverTypes[] = {
    ElementType::kU8,     ElementType::kU16,  ElementType::kU32,    ElementType::kS32, ElementType::kU64,
    ElementType::kS64,    ElementType::kF16,  ElementType::kF32,    ElementType::kF64, ElementType::kBF16,
    ElementType::kF32Ftz, ElementType::kTF32, ElementType::kTF32Ftz};
constexpr int kNumDriverTypes = 16, kNumDriverSwizzles = 7;

bool is_float_type(ElementType type) {
    return type >= ElementType::kF16;
}

// Returns the bits of elements outside the tensor: 0 or a NaN.
uint64_t fill_bits(const TensorMap& map) {
    if (map.fill == Fill::kZero) return 0;
    if (map.element_bytes() == 2) return 0x7fff;
    return map.element_bytes() == 4 ? 0x7fffffff : 0x7fffffffffffffff;
}

float convert(ElementType type, float value) {
    const bool flushes = type == ElementType::kF32Ftz || type == ElementType::kTF32Ftz;
    if (flushes && std::fpclassify(value) == FP_SUBNORMAL) value = std::copysign(0.0f, value);
    if ((type == ElementType::kTF32 || type == ElementType::kTF32Ftz) && std::isfinite(value)) {
        const uint32_t bits = bit_cast<uint32_t>(value);  // rounds to 10 mantissa bits, ties to even
        value = bit_cast<float>((bits + 0xfff + (bits >> 13 & 1)) & ~uint32_t{0x1fff});
    }
    return value;
}

// Returns what is wrong with strides that no document says the driver accepts, or an empty string. The stride of a
// dimension of size 1 has no meaning, but must cover the inner dimensions as far as a map can hold that.
std::string undocumented_stride(const TensorMap& map) {
    uint64_t spanned = (map.dims[0] * map.element_bytes() + 15) / 16 * 16;
    for (int i = 1; i < map.rank(); ++i) {
        const uint64_t stride = map.strides[i - 1], size = map.dims[i];
        const std::string of = "the stride of dimension " + std::to_string(i);
        if (size > 1 && stride == 0) return of + " is 0, and its size " + std::to_string(size);
        if (size == 1 && stride < std::min(spanned, kMostStride - 16)) {
            return of + ", of one element, is " + std::to_string(stride) + ", less than the " +
                   std::to_string(spanned) + " bytes that it spans";
        }
        spanned = std::max(spanned, stride < kMostStride / size ? stride * size : kMostStride);
    }
    return "";
}

// Returns a warning about a stride that the driver's documentation excludes, or an empty string. It states that each
// stride is a multiple of the stride before it and covers that dimension. The driver is known to accept other strides,
// such as FlashAttention-3's with the rows of all heads interleaved.
std::string unusual_stride(const TensorMap& map) {
    const uint64_t row = map.dims[0] * map.element_bytes();
    uint64_t inner = row, unit = 1;
    std::string found;
    for (int i = 1; i < map.rank(); ++i) {
        const uint64_t stride = map.strides[i - 1];
        if (map.dims[i] == 1) continue;
        const auto say = [&](const char* what, uint64_t than, const char* of) {
            return "the stride of dimension " + std::to_string(i) + ", " + std::to_string(stride) + ", is " + what +
                   std::to_string(than) + of + " (CUDA Driver API, cuTensorMapEncodeTiled: globalStrides)";
        };
        if (stride < row) return say("less than the ", row, " bytes of dimension 0");
        if (found.empty() && stride < inner) found = say("less than the ", inner, " bytes that it spans");
        if (found.empty() && stride % unit != 0) found = say("no multiple of ", unit, ", the one before it");
        inner = stride * map.dims[i], unit = stride;
    }
    return found;
}

}  // namespace

int TensorMap::element_bytes() const {
    return kElementBytes[static_cast<int>(type)];
}

int64_t TensorMap::box_bytes() const {
    int64_t bytes = row_bytes();
    for (int i = 1; i < rank(); ++i) bytes *= box_count(i);
    return bytes;
}

std::string TensorMap::error() const {
    for (const uint8_t byte : reserved) {
        if (byte != 0) return "these 128 bytes are no tensor map";
    }
    if (rank() > kMostDimensions) return "a rank of " + std::to_string(rank()) + ": 1 to 5 are known";
    if (static_cast<size_t>(type) >= std::size(kElementBytes)) return "an unknown element type";
    if (interleave != 0) return "interleaved layouts are not supported";
    if (static_cast<int>(swizzle) > static_cast<int>(Swizzle::k128B)) return "an unknown swizzle";
    if (static_cast<int>(fill) > static_cast<int>(Fill::kNaN)) return "an unknown fill mode";
    if (fill == Fill::kNaN && !is_float_type(type)) return "a fill with NaN, but elements that are no floating-point";
    if (address % 16 != 0) return "the tensor's address is no multiple of 16";
    for (int i = 0; i < rank(); ++i) {
        const std::string of = " of dimension " + std::to_string(i);
        if (dims[i] == 0 || dims[i] > kMostDim) return "the size" + of + " is not within 1 to 2^32";
        if (box[i] == 0 || box[i] > kMostBox) return "the box size" + of + " is not within 1 to 256";
        if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= kMostStride)) {
            return "the stride" + of + " is no multiple of 16 bytes below 2^40";
        }
        if (i > 0 && (element_strides[i] == 0 || element_strides[i] > kMostElementStride)) {
            return "the element stride" + of + " is not within 1 to 8";
        }
    }
    if (row_bytes() % 16 != 0) return "the box's dimension 0 has no multiple of 16 bytes";
    if (swizzle != Swizzle::kNone && row_bytes() > 16 << static_cast<int>(swizzle)) {
        return "the box's dimension 0 has " + std::to_string(row_bytes()) + " bytes, more than the swizzle's " +
               std::to_string(16 << static_cast<int>(swizzle));
    }
    return "";
}

int encode_tiled(void* map, int data_type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
                 const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion,
                 int fill, std::string* reason) {
    const auto refuse = [&](int code, const std::string& why) {
        if (reason != nullptr) *reason = why;
        return code;
    };
    const auto in_range = [](int value, int count) { return value >= 0 && value < count; };
    if (map == nullptr || reinterpret_cast<uintptr_t>(map) % kTensorMapAlignment != 0) {
        return refuse(kInvalidValue, "the tensor map's address is no multiple of 64");
    }
    if (!in_range(data_type, kNumDriverTypes)) return refuse(kInvalidValue, "an unknown element type");
    if (!in_range(data_type, std::size(kDriverTypes))) {
        return refuse(kNotSupported, "packed 4- and 6-bit elements need sm_100");
    }
    if (rank == 0 || rank > kMostDimensions) return refuse(kInvalidValue, "the rank is not within 1 to 5");
    if (!in_range(interleave, 3)) return refuse(kInvalidValue, "an unknown interleaved layout");
    if (interleave != 0) return refuse(kNotSupported, "interleaved layouts are not supported");
    if (!in_range(swizzle, kNumDriverSwizzles)) return refuse(kInvalidValue, "an unknown swizzle");
    if (swizzle > static_cast<int>(Swizzle::k128B)) return refuse(kNotSupported, "a swizzle that needs sm_100");
    if (!in_range(promotion, 4)) return refuse(kInvalidValue, "an unknown L2 promotion");
    if (!in_range(fill, 2)) return refuse(kInvalidValue, "an unknown fill mode");
    if (address == nullptr || dims == nullptr || box == nullptr || element_strides == nullptr ||
        (strides == nullptr && rank > 1)) {
        return refuse(kInvalidValue, "a null pointer");
    }
    TensorMap encoded{};
    encoded.address = reinterpret_cast<uintptr_t>(address);
    encoded.last_dimension = static_cast<uint8_t>(rank - 1);
    encoded.type = kDriverTypes[data_type];
    encoded.swizzle = static_cast<Swizzle>(swizzle);
    encoded.promotion = static_cast<uint8_t>(promotion);
    encoded.fill = static_cast<Fill>(fill);
    for (uint32_t i = 0; i < rank; ++i) {
        // Checked before the narrowing conversions, which would wrap values that are out of range.
        if (box[i] > kMostBox || element_strides[i] == 0 || element_strides[i] > kMostElementStride) {
            return refuse(kInvalidValue,
                          "a box size that is not within 1 to 256, or an element stride that is not within 1 to 8");
        }
        encoded.dims[i] = dims[i];
        if (i > 0) encoded.strides[i - 1] = strides[i - 1];
        encoded.box[i] = static_cast<uint16_t>(box[i]);
        encoded.element_strides[i] = static_cast<uint8_t>(element_strides[i]);
    }
    const std::string error = encoded.error();
    if (!error.empty()) return refuse(kInvalidValue, error);
    const std::string wrong_stride = undocumented_stride(encoded);
    if (!wrong_stride.empty()) return refuse(kInvalidValue, wrong_stride);
    std::memcpy(map, &encoded, sizeof(encoded));
    return refuse(0, unusual_stride(encoded));
}

void each_row(const TensorMap& map, const int32_t* coordinates, const std::function<void(const BoxRow&)>& visit) {
    const int64_t first = coordinates[0], size = static_cast<int64_t>(map.dims[0]), count = map.box[0];
    const int64_t begin = std::min(std::max<int64_t>(-first, 0), count);
    const int64_t end = std::max(std::min(size - first, count), begin);
    int index[kMostDimensions] = {};
    int64_t offset = 0;
    while (true) {
        bool is_inside = end > begin;
        uint64_t address = map.address;
        for (int i = 1; i < map.rank(); ++i) {
            const int64_t at = coordinates[i] + int64_t{index[i]} * map.element_strides[i];
            is_inside = is_inside && at >= 0 && at < static_cast<int64_t>(map.dims[i]);
            address += static_cast<uint64_t>(at) * map.strides[i - 1];
        }
        const int width = map.element_bytes();
        BoxRow row{offset, 0, static_cast<int>(begin) * width, 0};
        if (is_inside) {
            row.address = address + static_cast<uint64_t>(first + begin) * width;
            row.bytes = static_cast<int>(end - begin) * width;
        }
        visit(row);
        offset += map.row_bytes();
        int dimension = 1;
        while (dimension < map.rank() && ++index[dimension] == map.box_count(dimension)) index[dimension++] = 0;
        if (dimension >= map.rank()) break;
    }
}

void complete_row(const TensorMap& map, const BoxRow& row, const std::byte* source, std::byte* out) {
    const int width = map.element_bytes(), inside_end = row.before + row.bytes;
    const uint64_t outside = fill_bits(map);
    for (int at = 0; at < map.row_bytes(); at += width) {
        if (row.bytes == 0 || at < row.before || at >= inside_end) std::memcpy(out + at, &outside, width);
    }
    std::memcpy(out + row.before, source, row.bytes);
    if (map.type != ElementType::kF32Ftz && map.type != ElementType::kTF32 && map.type != ElementType::kTF32Ftz) return;
    for (int at = row.before; at < inside_end; at += width) {
        float value;
        std::memcpy(&value, out + at, width);
        value = convert(map.type, value);
        std::memcpy(out + at, &value, width);
    }
}

}  // namespace emulator
