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
    // A Fault unless `rows` 16-bit elements along M or N, where these are contiguous, are whole swizzle atoms, or lie
    // in a single one, as Triton has them where warpgroups share N.
    void require_whole_atoms(int rows, const char* which) const;

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

// Calls function(address, row - first, k) for the 16 bytes that begin with element (row, k) and go on along M or N if it
// is MN-major, else along K: those of rows [first, first + rows), with `each` elements in 16 bytes.
template <typename Function>
void each_chunk(const MatrixDescriptor& matrix, bool is_mn_major, int first, int rows, int each, Function&& function) {
    if (is_mn_major) {
        for (int k = 0; k < 2 * each; ++k) {
            for (int row = 0; row < rows; row += each) function(matrix.mn_major((first + row) / each, k), row, k);
        }
    } else {
        for (int row = 0; row < rows; ++row) {
            for (int half = 0; half < 2; ++half) function(matrix.k_major(first + row, half), row, half * each);
        }
    }
}

// Reads rows [first, first + rows) of M or N: element (row, k) to out[(row - first) * row_step + k * k_step].
template <typename Format, typename T>
void read_matrix(Cta& cta, const MatrixDescriptor& matrix, bool is_mn_major, int first, int rows, const char* which,
                 T* out, int row_step, int k_step) {
    constexpr int kEach = 16 / Format::kBytes;
    const int step = is_mn_major ? row_step : k_step;
    each_chunk(matrix, is_mn_major, first, rows, kEach, [&](uint64_t address, int row, int k) {
        const std::byte* chunk = wgmma_chunk(cta, address, which);
        T* const to = out + row * row_step + k * k_step;
        for (int i = 0; i < kEach; ++i) to[i * step] = Format::get(chunk, i);
    });
}

}  // namespace emulator
