#include "wgmma_operands.h"

#include <sstream>

namespace emulator {

MatrixDescriptor::MatrixDescriptor(uint64_t bits)
    : start((bits & 0x3fff) << 4),
      leading((bits >> 16 & 0x3fff) << 4),
      stride((bits >> 32 & 0x3fff) << 4),
      base_offset(bits >> 49 & 7) {
    constexpr int kSwizzles[] = {16, 128, 64, 32};
    constexpr uint64_t kReserved = 0x3ff1c000c000c000;
    swizzle = kSwizzles[bits >> 62];
    std::ostringstream text;
    text << "the matrix descriptor 0x" << std::hex << bits << std::dec;
    if ((bits & kReserved) != 0) throw Fault("wgmma", text.str() + " has reserved bits that are not 0", 0);
    if (base_offset >= static_cast<uint32_t>(swizzle / 16)) {
        throw Fault("wgmma", text.str() + " has a base offset beyond its swizzling pattern", 0);
    }
}

uint64_t MatrixDescriptor::k_major(int row, int half) const {
    const uint64_t next_half = swizzle == 16 ? leading : 16;
    return swizzled(row % 8 * swizzle + row / 8 * stride + half * next_half);
}

uint64_t MatrixDescriptor::mn_major(int rows, int k) const {
    if (swizzle == 16) return swizzled(rows * stride + k % 8 * 16 + k / 8 * leading);
    const int in_row = swizzle / 16;
    return swizzled(rows % in_row * 16 + rows / in_row * leading + k % 8 * swizzle + k / 8 * stride);
}

void MatrixDescriptor::require_whole_atoms(int rows, const char* which) const {
    const int begin = static_cast<int>(start % swizzle), bytes = 2 * rows;
    if (begin + bytes <= swizzle || (begin == 0 && bytes % swizzle == 0)) return;
    std::ostringstream text;
    text << "matrix " << which << " is MN-major, with " << rows << " elements from element " << begin / 2
         << " of a swizzle atom on, which has " << swizzle / 2
         << "; matrices are made up of whole ones (PTX ISA, \"Shared Memory Matrix Layout\")";
    throw Fault("wgmma", text.str(), 0);
}

const std::byte* wgmma_chunk(Cta& cta, uint64_t address, const char* which) {
    const std::byte* const found = cta.shared(address, 16);
    const auto describe = [&](const char* what) {
        return "matrix " + std::string(which) + ": " + what + " at offset " + std::to_string(address) +
               " of shared memory";
    };
    if (found == nullptr) {
        throw Fault("wgmma", describe("16 bytes") + ", which ends at " + std::to_string(cta.shared_bytes()), 0);
    }
    if (cta.touches_mbarrier(address, 16)) throw Fault("wgmma", describe("an mbarrier"), 0);
    if (cta.launch.uninitialised && !cta.is_written(address, 16)) {
        throw Fault("uninitialised", describe("bytes that nothing has written"), 0);
    }
    return found;
}

}  // namespace emulator
