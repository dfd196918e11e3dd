// Matrices in shared memory as wgmma's descriptors describe them. PTX ISA, "Asynchronous Warpgroup Level Matrix Shared
// Memory Layout".
#pragma once

#include "../machine.h"

namespace emulator {

struct MatrixDescriptor {
    explicit MatrixDescriptor(uint64_t bits);  // a Fault if hardware would not take it

    uint64_t start, leading, stride;  // bytes
    uint32_t base_offset;
    int swizzle;  // bytes of a row of the pattern: 16 (none), 32, 64 or 128

    // Where 16 bytes of the matrix are. K-major: of row `row` (of M or N), and of the two halves of its 32 bytes of K.
    uint64_t k_major(int row, int half) const;
    // MN-major, 16-bit elements: of 8 rows from 8 · `rows` on, at one k.
    uint64_t mn_major(int rows, int k) const;

  private:
    // Swizzling exchanges 16-byte units within 128 bytes, by the bits of the address that count these.
    uint64_t swizzled(uint64_t offset) const {
        const uint64_t address = start + offset;
        const uint64_t row = (address >> 7) - base_offset;
        return address ^ ((row & (swizzle / 16 - 1)) << 4);
    }
};

// 16 bytes for wgmma to read, or a Fault; `which`: "A" or "B".
const std::byte* wgmma_chunk(Cta& cta, uint64_t address, const char* which);

// Reads rows [first, first + rows) of M or N: element (row, k) to out[(row - first) * row_step + k * k_step].
template <typename Format, typename T>
void read_matrix(Cta& cta, const MatrixDescriptor& matrix, bool is_mn_major, int first, int rows, int depth,
                 const char* which, T* out, int row_step, int k_step) {
    constexpr int kEach = 16 / Format::kBytes;
    if (is_mn_major) {
        for (int k = 0; k < depth; ++k) {
            for (int row = 0; row < rows; row += kEach) {
                const std::byte* chunk = wgmma_chunk(cta, matrix.mn_major((first + row) / kEach, k), which);
                T* const to = out + row * row_step + k * k_step;
                for (int i = 0; i < kEach; ++i) to[i * row_step] = Format::get(chunk, i);
            }
        }
        return;
    }
    for (int row = 0; row < rows; ++row) {
        for (int half = 0; half < 2; ++half) {
            const std::byte* chunk = wgmma_chunk(cta, matrix.k_major(first + row, half), which);
            T* const to = out + row * row_step + half * kEach * k_step;
            for (int i = 0; i < kEach; ++i) to[i * k_step] = Format::get(chunk, i);
        }
    }
}

}  // namespace emulator
